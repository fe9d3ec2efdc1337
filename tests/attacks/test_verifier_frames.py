"""Code that grades, or that a policy wrote, sends what stalls the loop: large frames, many values, frames without end."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import anyio.lowlevel
import pytest

from fleetbus_workers.environment.isolation.sandbox.channel import MAX_RECEIVED_BYTES, Channel, ChannelBroken
from fleetbus_workers.environment.isolation.verifier.sandbox import Verifier, answer_calls

LEASE_SECONDS = 1.0
"""A tenth of a lease; the attack took 9 to 14 s."""


class NoTools:
    async def call_tool(self, name: str, arguments: dict[str, object]) -> object:
        raise RuntimeError("no tools here")

    async def query(self, sql: str, parameters: list[object]) -> object:
        raise RuntimeError("no tools here")


@contextmanager
def verifier(*frames: bytes, endless: bool = False) -> Iterator[Channel]:
    """A process that sends these frames, again and again if ``endless``, whatever is asked."""
    mine, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):
            while True:
                for frame in frames:
                    theirs.sendall(frame)
                if not endless:
                    return

    thread = threading.Thread(target=send, daemon=True)
    drain = threading.Thread(target=lambda: _drain(theirs), daemon=True)
    thread.start()
    drain.start()
    channel = Channel(mine)
    try:
        yield channel
    finally:
        channel.close()
        theirs.close()
        thread.join(5)
        drain.join(5)


def _drain(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 20):
            pass


def framed(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


FRAMES = {
    "15 MB": framed(b'{"reward": 1.0, "output": "' + b"x" * 15_000_000 + b'"}'),
    "a length of 4 GB": struct.pack("!I", 0xFFFFFFFF),
    "just too large": framed(b'{"reward":1' + b" " * MAX_RECEIVED_BYTES + b"}"),
    "values": framed(b'{"reward": [' + b"[]," * 300_000 + b"[]]}"),
    "depth": framed(b"[" * 900_000),
    "no JSON": framed(b"\xff" * 100),
}


async def longest_stall(stop: anyio.Event) -> float:
    longest = 0.0
    while not stop.is_set():
        began = anyio.current_time()
        await anyio.sleep(0.005)
        longest = max(longest, anyio.current_time() - began)
    return longest


@pytest.mark.parametrize("name", FRAMES)
async def test_a_frame_that_would_stall_the_loop_is_no_verdict(name: str) -> None:
    stop, stalls = anyio.Event(), []

    async def watch() -> None:
        stalls.append(await longest_stall(stop))

    with anyio.fail_after(20), verifier(FRAMES[name]) as channel:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await anyio.sleep(0.02)
            with pytest.raises(ChannelBroken):
                await answer_calls(channel, {"code": ""}, NoTools())  # type: ignore[arg-type]
            stop.set()
    assert stalls[0] < LEASE_SECONDS


@pytest.mark.parametrize("message", [{"call": "nonsense"}, {"call": "query", "arguments": ["x", []]}])
async def test_calls_without_an_end_leave_others_their_turn(message: dict[str, object]) -> None:
    frame = framed(json.dumps(message).encode())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    with anyio.fail_after(20), verifier(frame * 1000, endless=True) as channel:
        with anyio.move_on_after(0.5) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(others)
                await answer_calls(channel, {"code": ""}, NoTools())  # type: ignore[arg-type]
    assert scope.cancelled_caught and turns > 100


async def test_a_frame_of_half_the_limit_is_read() -> None:
    output = "x" * (MAX_RECEIVED_BYTES // 2)
    with verifier(framed(json.dumps({"reward": 1.0, "output": output}).encode())) as channel:
        verdict = await answer_calls(channel, {"code": ""}, NoTools())  # type: ignore[arg-type]
    assert verdict.reward == 1.0


CALLING = """
async def verify(env):
    try:
        await env.call_tool("python_call", {"code": "\u00e9" * SIZE})
    except RuntimeError as error:
        return 0.5 if "no tools here" in str(error) else 0.0
"""


@pytest.mark.parametrize(("size", "reward"), [(100_000, 0.5), (200_000, 0.0)])
async def test_what_a_policy_wrote_is_never_too_large_for_a_verdict(size: int, reward: float) -> None:
    """A file of the agent's that a verifier passes on: the call is refused, and the verifier may say what that is worth."""
    grader = Verifier(sandbox="limits")
    async with grader.run():
        code = CALLING.replace("SIZE", str(size))
        verdict = await grader.verify(code, final_answer=None, conversation=[], tools=NoTools())  # type: ignore[arg-type]
    assert verdict.reward == reward, verdict.reason
