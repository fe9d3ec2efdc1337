"""Verdicts for a replay: the same code under the same limits and isolation, but many verdicts per process.

Above it are the environments of a replay; below it `verifying_inside.py` in a few children. Whatever is not a plain
verdict there - an exception, a death, silence - is verified again in the worker's own way, a fresh process, and that counts.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio

from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.isolation.sandbox.channel import Channel, ChannelBroken
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits, VerifierTools
from fleetbus_workers.environment.isolation.verifier.sandbox import answer_calls

MAX_IDLE = 8
"""Processes that wait for another request."""


class RepeatingVerifier(Verifier):
    """`Verifier` for many episodes that need no protection from each other; use it inside `running`."""

    program: ClassVar[Path] = Path(__file__).with_name("verifying_inside.py")

    def __init__(self, limits: VerifierLimits | None = None) -> None:
        super().__init__(limits)
        self._fresh = Verifier(limits)
        self._idle: deque[Channel] = deque()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._fresh.running(), super().running():
            try:
                yield
            finally:
                while self._idle:
                    self._idle.pop().close()

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        """See `Verifier.verify`; at most as many at a time."""
        request = {"code": code, "final_answer": final_answer, "conversation": conversation}
        assert self._slots is not None
        async with self._slots:
            with anyio.move_on_after(self.limits.seconds):
                verdict = await self._verify_in_reused(request, tools)
                if verdict.reward is not None:
                    return verdict
        return await self._fresh.verify(code, final_answer=final_answer, conversation=conversation, tools=tools)

    async def _verify_in_reused(self, request: dict[str, Any], tools: VerifierTools) -> Verdict:
        """The verdict of a process that may have given others before; it is kept for the next if it gave one."""
        channel = None
        try:
            channel = self._idle.pop() if self._idle else await self._start_channel()
            verdict = await answer_calls(channel, request, tools)
            if verdict.reward is not None and len(self._idle) < MAX_IDLE:
                self._idle.append(channel)
                channel = None
            return verdict
        except ChannelBroken as broken:
            return Verdict(reward=None, reason=str(broken))
        finally:
            if channel is not None:
                channel.close()

    async def _start_channel(self) -> Channel:
        """A new process; raises `ChannelBroken` if there is none to be had."""
        zygote = await self._running_zygote()
        mine, theirs = socket.socketpair()
        try:
            await zygote.adopt(theirs)
        except BaseException as error:
            mine.close()
            if isinstance(error, OSError):
                await self._discard(zygote)
                raise ChannelBroken(str(error)) from error
            raise
        finally:
            theirs.close()
        return Channel(mine)
