"""An environment whose server is started for its episode: start, wait until it answers, play, stop in every case."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.providers.base import ProvidedServer, Provider, wait_until_ready
from fleetbus_workers.environment.base import Environment, EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.ownership import Labels, build_process_owner

READY_PATH = "/health"
STOP_SECONDS = 60.0
SPARE_SECONDS = 600
"""How much longer than its episode a server may live before a sweep takes it."""

_log = structlog.get_logger(__name__)


class ServerHost:
    """The servers of one worker; use it inside `run`. ``inner`` makes the factory for a server's URL."""

    def __init__(
        self,
        provider: Provider,
        inner: Callable[[str], EnvironmentFactory],
        *,
        run: str,
        ready_seconds: float,
        episode_seconds: float,
    ) -> None:
        self.provider = provider
        self._inner = inner
        self._run = run
        self._ready_seconds = ready_seconds
        self._episode_seconds = episode_seconds
        self._owner = build_process_owner()
        self._tasks: TaskGroup | None = None

    def __call__(self) -> ProvisionedEnvironment:
        return ProvisionedEnvironment(self)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Sweep what a crash left, then serve; at the end every server is stopped."""
        try:
            await self._sweep()
            async with anyio.create_task_group() as self._tasks:
                yield
                self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_SECONDS):
                await self.provider.close()

    async def _sweep(self) -> None:
        try:
            removed = await self.provider.sweep()
        except EnvironmentFailed as error:
            _log.warning("orphan sweep failed; continuing", reason=str(error))
            return
        if removed:
            _log.info("orphaned servers removed", count=len(removed), names=removed[:20])

    async def enter(self, task: Task, done: anyio.Event, ended: anyio.Event) -> Environment:
        """An environment on a server of its own, until ``done``; then the server is stopped and ``ended`` set."""
        if self._tasks is None:
            raise RuntimeError("enter run() before the first episode")
        result: Environment | Exception = await self._tasks.start(self._serve, task, done, ended)
        if isinstance(result, Exception):
            raise result
        return result

    async def _serve(
        self, task: Task, done: anyio.Event, ended: anyio.Event, *, task_status: TaskStatus[Environment | Exception]
    ) -> None:
        """One server, in a task of its own, so that what its clients enter and leave is entered and left in one task."""
        has_started = False
        try:
            async with self._start_server(task) as server:
                factory = self._inner(server.url)
                async with factory.run():
                    task_status.started(factory())
                    has_started = True
                    await done.wait()
        except Exception as error:  # noqa: BLE001 - it belongs to the episode that asked
            if has_started:
                _log.warning("environment server failed at its end; stopping it", reason=str(error))
            else:
                task_status.started(error)
        finally:
            ended.set()

    @asynccontextmanager
    async def _start_server(self, task: Task) -> AsyncIterator[ProvidedServer]:
        expires = int(time.time() + self._episode_seconds) + SPARE_SECONDS
        labels = Labels(run=self._run, episode=task.key, owner=self._owner, expires=expires)
        server = await self.provider.start(labels)
        try:
            await wait_until_ready(self.provider, server, path=READY_PATH, seconds=self._ready_seconds)
            yield server
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_SECONDS):
                await self.provider.stop(server)


class ProvisionedEnvironment:
    """One episode on a server of its own."""

    replayable = False

    def __init__(self, host: ServerHost) -> None:
        self._host = host
        self._inner: Environment | None = None
        self._done = anyio.Event()
        self._ended: anyio.Event | None = None

    async def open(self, task: Task) -> None:
        self._ended = anyio.Event()
        self._inner = await self._host.enter(task, self._done, self._ended)
        await self._inner.open(task)

    async def reset(self) -> Start:
        return await self._require_environment().reset()

    async def step(self, action: Action) -> Step:
        return await self._require_environment().step(action)

    async def state(self) -> dict[str, Any]:
        return await self._require_environment().state()

    async def verify(self) -> Verdict:
        return await self._require_environment().verify()

    async def close(self) -> None:
        """Close the environment and wait until its server is gone."""
        try:
            if self._inner is not None:
                await self._inner.close()
        finally:
            self._done.set()
            if self._ended is not None and self._inner is not None:
                await self._ended.wait()

    def _require_environment(self) -> Environment:
        if self._inner is None:
            raise EnvironmentFailed("the environment is not open")
        return self._inner
