"""The run that agents as shipped are tried on: two gateways behind one address, and an inference worker, to be killed.

Agents know the address of a relay alone, which hands their connections to one gateway at a time, as a balancer does, and
listens to what is asked and answered.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import httpx

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    PolicyPublished,
    Subjects,
    Task,
    decode,
    encode,
)
from fleetbus_workers.learner.batches import count_trained
from fleetbus_workers.learner.rejection_sampling import build_sequences
from tests.agents.gateway_support import find_port, wait_for
from tests.support.relay import Relay
from tests.support.servers import connect, run_server

RUN = "tried"
SUBJECTS = Subjects(RUN)
ROOT = Path(__file__).resolve().parents[3]
SAMPLING_SECONDS = {"calm": 0.0, "disturbed": 1.5}
EPISODE_SECONDS = 400
ANY_VOCABULARY = 1 << 31
REQUEST = re.compile(rb"(POST|GET|HEAD) (/[^ ]*) HTTP/1\.1\r\n")
HEAD = re.compile(rb"HTTP/1\.1 (\d\d\d) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)


class Switch(Relay):
    """Hands connections to one port at a time."""

    def __init__(self, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}")

    async def turn_to(self, port: int) -> None:
        """All connections end; new ones go there."""
        await self.cut()
        self._upstream_port = port
        await self.mend()


class Balancer(Switch):
    """Keeps what was asked and answered too, by path, status and kind of content."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.answered: list[tuple[int, bool]] = []

    async def _answered(self, chunk: bytes) -> None:
        for head in HEAD.finditer(chunk):
            self.answered.append((int(head[1]), b"text/event-stream" in head[2].lower()))

    def list_paths(self, method: str = "POST") -> list[str]:
        """The paths that were asked with this method, in order."""
        return [match[2].decode() for match in REQUEST.finditer(bytes(self.heard)) if match[1].decode() == method]

    def forget(self) -> None:
        self.heard.clear()
        self.answered.clear()


B = TypeVar("B", bound=Switch)


class Stage(Generic[B]):
    """``balancer.url`` is what agents call; `replace_gateway` and `start_inference` replace what they kill."""

    def __init__(self, url: str, bus: Bus, folder: Path, policy: str, stack: ExitStack, balance: Callable[[int], B]) -> None:
        self._nats, self.bus, self._folder, self._policy, self._stack = url, bus, folder, policy, stack
        self._names = (f"i{number}" for number in range(100))
        self._ports = [find_port(), find_port()]
        self._gateways = [self._start_gateway(port) for port in self._ports]
        self._inference: dict[int, subprocess.Popen[bytes]] = {}
        self.balancer = balance(self._ports[0])

    def _start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        said = self._stack.enter_context((self._folder / log).open("ab"))
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in (".", "workers", "schemas"))}
        process = subprocess.Popen(command, cwd=self._folder, stdout=said, stderr=said, env=variables)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _start_gateway(self, port: int) -> subprocess.Popen[bytes]:
        options = ["--run", RUN, "--nats", self._nats, "--port", f"{port}", "--limits-reset", "240", "--limits-step", "120"]
        options += ["--environment-max-attempts", "1000"]
        return self._start(f"gateway-{port}.log", sys.executable, "-m", "fleetbus", "gateway", "agents", *options)

    async def start(self) -> None:
        """Wait until the gateways answer."""
        for port in self._ports:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                await wait_for(client)

    def start_inference(self, mode: str, place: int = 0) -> None:
        """Another one for the one there was at this place: `calm` or `disturbed`, which takes its time."""
        if place in self._inference:
            self._inference[place].kill()
        module = "tests.agents.tried.inference_process"
        words = (RUN, next(self._names), self._nats, self._policy, f"{SAMPLING_SECONDS[mode]}")
        self._inference[place] = self._start("inference.log", sys.executable, "-m", module, *words)

    async def kill_gateway(self) -> None:
        """The one that has the connections: they end, and the other one gets those that come."""
        self._gateways[0].kill()
        self._gateways.reverse()
        self._ports.reverse()
        await self.balancer.turn_to(self._ports[0])

    async def replace_gateway(self) -> None:
        """The same, and another one for it, which gets the connections when the other one is killed."""
        await self.kill_gateway()
        self._gateways[1] = self._start_gateway(self._ports[1])

    async def request(self, episode: str, prompt: str) -> None:
        asked = EpisodeRequested(
            episode_id=episode,
            sample_index=0,
            policy="default",
            task=Task(key="t", prompt=prompt),
            group_id=episode,
            split="train",
            max_turns=40,
            max_tokens=1 << 19,
            deadline_ns=self.bus.now_ns() + EPISODE_SECONDS * 10**9,
        )
        await self.bus.publish(SUBJECTS.task("default", episode), encode(asked), expected_last=0)

    async def take(self) -> dict[str, Any]:
        """The next session, with addresses of the balancer; asked for again, by the same key, when a gateway dies."""
        url = self.balancer.url.replace("nats:", "http:")
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        async with httpx.AsyncClient(base_url=url, timeout=90, headers=headers) as client:
            while True:
                try:
                    answer = await client.get("/sessions/next", params={"wait": 50})
                    if answer.status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.5)
        session: dict[str, Any] = answer.json()
        direct = session["url"].partition("/sessions")[0]
        return {name: each.replace(direct, url) if isinstance(each, str) else each for name, each in session.items()}

    async def count_calls(self, episode: str) -> int:
        """Calls of the agent that were played, answered or not."""
        turns = set()
        async for entry in self.bus.scan([SUBJECTS.observations()]):
            observed = decode(Observation, entry.payload)
            if observed.episode_id == episode:
                turns.add(observed.turn)
        return len(turns)

    async def result(self, episode: str) -> EpisodeFinished | None:
        async for entry in self.bus.scan([SUBJECTS.episodes]):
            decoded = decode_episode_entry(entry)
            if isinstance(decoded, EpisodeFinished) and decoded.episode_id == episode:
                return decoded
        return None

    async def count_trained(self, result: EpisodeFinished) -> int:
        """The turns whose every token stands under the masks of the sequences that a learner builds of this episode."""
        actions = {entry.sequence: decode(Action, entry.payload) async for entry in self.bus.scan([SUBJECTS.actions()])}
        sequences = build_sequences(result, actions, ANY_VOCABULARY)
        assert not isinstance(sequences, str), sequences
        of_turns = count_trained(result, [actions[reference.sequence] for reference in result.actions])
        assert sum(int(sequence.loss_mask.sum()) for sequence in sequences) == sum(of_turns)
        return sum(tokens > 0 for tokens in of_turns)


@asynccontextmanager
async def running(folder: Path, policy: str, balance: Callable[[int], B] = Balancer) -> AsyncIterator[Stage[B]]:  # type: ignore[assignment]
    """A stage with a server of its own."""
    async with run_server(folder / "store") as server, connect(server.url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=4, max_bytes=1 << 30))
        published = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(published))
        with ExitStack() as stack:
            stage = Stage(server.url, bus, folder, policy, stack, balance)
            stage.start_inference("calm")
            await stage.start()
            async with stage.balancer.running():
                yield stage
