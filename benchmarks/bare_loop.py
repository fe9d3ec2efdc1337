"""The floor of the step loop: Observation → Action → Observation on nats-py and nothing else.

Both directions go through one file-backed stream, every publish has a message id and waits for the stream's ack, the answering
side pulls with credits and acks after its answer is stored. No sessions, claims, deadlines, leases, environment or sampler.

    python benchmarks/bare_loop.py --sessions 1,64,256 --turns 400,60,20

Three processes: nats-server, asking side (this one), answering side. One JSON object per number of sessions on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import nats
import uvloop
from nats.js.api import ConsumerConfig, StreamConfig

from benchmarks.load_plan import LoadPlan, parse_plan, summarize_latencies, temporary_server

CREDITS = 64
CONTENT_BYTES = 400
TEXT_BYTES = 600
TOKENS = 200
STREAM = "FLOOR"


class Asked(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """The least that an observation is."""

    episode: str
    attempt: int
    turn: int
    deadline: int
    messages: list[dict[str, str]]


class Answered(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """The least that an action is."""

    episode: str
    attempt: int
    turn: int
    text: str
    ids: bytes
    logprobs: bytes
    version: int


_encode = msgspec.msgpack.Encoder().encode
_decode_asked = msgspec.msgpack.Decoder(Asked).decode
_decode_answered = msgspec.msgpack.Decoder(Answered).decode


class AnsweringSide:
    """Pulls with `CREDITS` credits and answers each message in a task of its own."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._stream = connection.jetstream()
        self._inbox = connection.new_inbox()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self._connection.subscribe(self._inbox, cb=self._on_message)
        await self._pull(CREDITS)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.sleep(3600)

    async def _pull(self, credits: int) -> None:
        wanted = json.dumps({"batch": credits, "expires": 30_000_000_000}).encode()
        await self._connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.answering", wanted, reply=self._inbox)

    async def _on_message(self, message: Any) -> None:
        if message.data:
            task = asyncio.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Any) -> None:
        asked = _decode_asked(message.data)
        answer = Answered(
            episode=asked.episode,
            attempt=asked.attempt,
            turn=asked.turn,
            text="x" * TEXT_BYTES,
            ids=b"\1\0\0\0" * TOKENS,
            logprobs=b"\0\0\0\0" * TOKENS,
            version=1,
        )
        headers = {"Nats-Msg-Id": f"act:{asked.episode}:{asked.attempt}:{asked.turn}"}
        await self._stream.publish(f"floor.act.{asked.episode}", _encode(answer), headers=headers)
        await message.ack()
        await self._pull(1)


class AskingSide:
    """Runs sessions one turn after another and measures each turn from publish to answer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._stream = connection.jetstream()
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}

    async def declare(self) -> None:
        await self._stream.add_stream(
            StreamConfig(name=STREAM, subjects=["floor.>"], storage="file", max_bytes=2 << 30, duplicate_window=120)
        )
        await self._stream.add_consumer(
            STREAM,
            ConsumerConfig(
                durable_name="answering",
                filter_subject="floor.obs.>",
                ack_policy="explicit",
                ack_wait=30,
                max_ack_pending=4096,
            ),
        )
        await self._connection.subscribe("floor.act.>", cb=self._on_message)

    async def measure(self, plan: LoadPlan) -> dict[str, float]:
        latencies: list[float] = []
        cpu, started = time.process_time(), time.perf_counter()
        names = (f"e{plan.sessions}x{index}" for index in range(plan.sessions))
        await asyncio.gather(*(self._session(name, plan.turns, latencies) for name in names))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"sessions": plan.sessions} | summarize_latencies(latencies, wall_seconds=wall, cpu_seconds=cpu)

    async def _session(self, name: str, turns: int, latencies: list[float]) -> None:
        messages = [{"role": "user", "content": "y" * CONTENT_BYTES}]
        for turn in range(turns):
            answered = self._waiting[name, turn] = asyncio.get_running_loop().create_future()
            started = time.perf_counter()
            payload = _encode(Asked(episode=name, attempt=1, turn=turn, deadline=0, messages=messages))
            await self._stream.publish(f"floor.obs.{name}", payload, headers={"Nats-Msg-Id": f"obs:{name}:1:{turn}"})
            await answered
            latencies.append(time.perf_counter() - started)

    async def _on_message(self, message: Any) -> None:
        answer = _decode_answered(message.data)
        waiting = self._waiting.pop((answer.episode, answer.turn), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


async def answer(url: str) -> None:
    """The answering process."""
    connection = await nats.connect(url)
    await AnsweringSide(connection).run()


async def measure_floor(url: str, plans: list[LoadPlan]) -> list[dict[str, float]]:
    """The floor on a running server, one measurement per plan."""
    connection = await nats.connect(url)
    asking = AskingSide(connection)
    await asking.declare()
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--answer", url]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    try:
        assert other.stdout is not None
        await asyncio.to_thread(other.stdout.readline)
        return [await asking.measure(plan) for plan in plans]
    finally:
        other.kill()
        other.wait()
        await asyncio.shield(connection.close())


async def _main(plans: list[LoadPlan]) -> None:
    async with temporary_server() as url:
        for measured in await measure_floor(url, plans):
            print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--sessions", default="1,64,256")
    parser.add_argument("--turns", default="400,60,20")
    options = parser.parse_args()
    uvloop.run(answer(options.answer) if options.answer else _main(parse_plan(options.sessions, options.turns)))
