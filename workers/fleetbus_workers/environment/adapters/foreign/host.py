"""Plays episodes in another package's interpreter: one process per worker, started when an episode needs it.

The package asks the endpoint of agents for completions, so tokens and log-probabilities are those of the inference worker. Two
named pipes lead to the process; their names are gone once both sides have them. The process runs where agents run: in the
sandbox if there is one. See docs/decisions/0211-foreign-environments-in-their-own-interpreter.md.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import structlog

from fleetbus.concurrency.wakeup import Wakeup
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.environment.adapters.agent.host import AgentHost
from fleetbus_workers.environment.adapters.agent.process import AgentLimits, AgentProcess
from fleetbus_workers.environment.adapters.foreign.pipes import open_pipes, remove_names
from fleetbus_workers.environment.base import EnvironmentFailed

CANCEL_SECONDS = 5.0
"""How long the package may take to end an episode; after that its process is ended, with all that it plays."""

READ_BYTES = 1 << 16
REPLY_BYTES = 1 << 20
"""Most of one line of the runner's."""

RESTART_SECONDS = 1.0
LIMITS = AgentLimits(folder_bytes=8 << 30, memory_bytes=32 << 30, processes=8192, open_files=16_384)
"""Of one process that plays the episodes of all slots."""

log = structlog.get_logger(__name__)


class Reply(msgspec.Struct):
    """One line of the runner's."""

    id: int = -1
    ready: bool = False
    error: str = ""


class ForeignEpisode:
    """One episode in the other interpreter: the process of an `AgentEnvironment`, as far as that can see."""

    def __init__(self, cancel: Callable[[], None], end_runner: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._cancel = cancel
        self._end_runner = end_runner
        self._ended = ended
        self._done = anyio.Event()
        self._error = ""

    def conclude(self, error: str) -> None:
        """It is over, for ``error`` if there is one."""
        self._error = error
        self._done.set()
        self._ended()

    @property
    def status(self) -> int | None:
        return int(bool(self._error)) if self._done.is_set() else None

    def read_last_line(self) -> str:
        return f": {self._error}" if self._error else ""

    async def wait(self) -> int:
        await self._done.wait()
        return int(bool(self._error))

    async def end_all(self) -> None:
        """Cancel it; what does not end in time is ended with the process."""
        if self._done.is_set():
            return
        self._cancel()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CANCEL_SECONDS):
                await self._done.wait()
                return
            self._end_runner(f"an episode did not end within {CANCEL_SECONDS:g} s of being cancelled")

    async def stop(self) -> None:
        await self.end_all()


class ForeignHost(AgentHost):
    """Starts episodes in the interpreter of another package; use it inside `run`. Its command is the runner's."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve the endpoint, and keep the process while episodes need it."""
        self._episodes: dict[int, ForeignEpisode] = {}
        self._waiting: dict[int, bytes] = {}
        """Lines of episodes that no process has been asked for."""
        self._unsent = bytearray()
        self._count, self._wanted = 0, Wakeup()
        self._process: AgentProcess | None = None
        self._ended = anyio.Event()
        async with super().run(), anyio.create_task_group() as group:
            group.start_soon(self._supervise)
            yield
            group.cancel_scope.cancel()

    async def start(  # type: ignore[override]
        self, folder: Path, variables: Mapping[str, str], *, ended: Callable[[], None]
    ) -> ForeignEpisode:
        """Ask for an episode; ``ended`` is called when it is over. What the runner needs of ``variables`` is in the line."""
        task = msgspec.json.decode(await anyio.Path(variables["FLEETBUS_TASK_FILE"]).read_bytes())
        number, self._count = self._count, self._count + 1
        base_url = f"{self.endpoint.url}/s/{variables['OPENAI_API_KEY']}/v1"
        asked = {"id": number, "reward_url": task.pop("reward_url", ""), "task": task, "base_url": base_url}
        episode = self._episodes[number] = ForeignEpisode(partial(self._cancel, number), self._end_runner, ended)
        self._waiting[number] = encode_line(asked)
        self._wanted.set()
        return episode

    def _cancel(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._episodes.pop(number).conclude("cancelled")
        elif number in self._episodes:
            self._unsent += encode_line({"cancel": number})
            self._wanted.set()

    def _end_runner(self, reason: str) -> None:
        if self._process is not None:
            self._reason = reason
            self._process.end(reason)
            self._ended.set()

    async def _supervise(self) -> None:
        while True:
            while not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                reason = await self._play()
            except EnvironmentFailed as failed:
                reason = str(failed)
                self._waiting.clear()
            self._unsent.clear()
            lost = [number for number in self._episodes if number not in self._waiting]
            log.warning("the process of another package ended; excluding its episodes", reason=reason, episodes=len(lost))
            for number in lost:
                self._episodes.pop(number).conclude(reason)
            await anyio.sleep(RESTART_SECONDS)

    async def _play(self) -> str:
        """Run the process until it ends; why it did."""
        folder, self._ended, self._reason = self.make_folder(), anyio.Event(), ""
        try:
            with open_pipes(folder) as (requests, replies):
                self._process = process = await super().start(folder, {}, ended=self._ended.set)
                try:
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._write, requests)
                        group.start_soon(self._read, replies, folder)
                        await self._ended.wait()
                        group.cancel_scope.cancel()
                    return self._reason or f"the process ended with status {process.status}{process.read_last_line()}"
                finally:
                    self._process = None
                    await process.stop()
        finally:
            with anyio.CancelScope(shield=True):
                await self.remove_folder(folder)

    async def _write(self, requests: int) -> None:
        while True:
            while not (self._unsent or self._waiting):
                self._wanted.clear()
                await self._wanted.wait()
            while self._waiting:
                self._unsent += self._waiting.pop(next(iter(self._waiting)))
            await anyio.wait_writable(requests)
            try:
                del self._unsent[: os.write(requests, self._unsent)]
            except BlockingIOError:
                continue  # less than a line of room

    async def _read(self, replies: int, folder: Path) -> None:
        held = b""
        while True:
            await anyio.wait_readable(replies)
            *lines, held = (held + os.read(replies, READ_BYTES)).split(b"\n")
            for line in lines:
                try:
                    reply = msgspec.json.decode(line, type=Reply)
                except UNREADABLE as error:
                    return self._end_runner(f"the process wrote what is no reply: {error}")
                if reply.ready:
                    remove_names(folder)
                elif (episode := self._episodes.pop(reply.id, None)) is not None:
                    episode.conclude(reply.error)
            if len(held) > REPLY_BYTES:
                return self._end_runner(f"the process wrote a reply of over {REPLY_BYTES} bytes")


def encode_line(asked: object) -> bytes:
    return msgspec.json.encode(asked) + b"\n"
