"""A task group whose tasks hold a third of the memory: for tens of thousands that wait.

A task that anyio starts on asyncio holds 4 KiB before it does anything: a handle with an event, a scope, a closure. Nobody asks
for those handles here. The tasks are asyncio's own, each in one cancel scope, and one task of an anyio group answers for all:
what cancels the group cancels each, the first that fails ends all, and the group ends after the last. Elsewhere than on
asyncio it is a plain anyio group.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from fleetbus.concurrency.wakeup import Wakeup

Function = Callable[..., Awaitable[None]]


class CompactTasks:
    """The tasks of one group. `supervise` runs as long as there may be any."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scopes: dict[asyncio.Task[None], anyio.CancelScope] = {}
        self._errors: list[BaseException] = []
        self._changed = Wakeup()
        self._on_end, self._context = self._forget, contextvars.copy_context()  # one for all
        self._open = True
        self._stopping = False

    def start_soon(self, function: Function, *arguments: Any) -> None:
        """As `TaskGroup.start_soon`."""
        if self._stopping and not self._scopes:
            raise RuntimeError("this task group has ended")
        scope = anyio.CancelScope()
        task = self._loop.create_task(self._run(scope, function(*arguments)), name=function.__qualname__)
        self._scopes[task] = scope
        task.add_done_callback(self._on_end, context=self._context)
        if self._stopping:
            scope.cancel()

    def close(self) -> None:
        """No more tasks will be started: `supervise` ends with the last."""
        self._open = False
        self._changed.set()

    async def supervise(self) -> None:
        """Answer for the tasks: cancelled, cancel them all and wait for their ends; raise what they raised."""
        try:
            while not self._errors and (self._open or self._scopes):
                await self._wait()
        finally:
            self._stopping = True
            for scope in tuple(self._scopes.values()):
                scope.cancel()
            with anyio.CancelScope(shield=True):
                while self._scopes:
                    await self._wait()
            if len(self._errors) == 1:
                raise self._errors[0]
            if self._errors:
                raise BaseExceptionGroup("errors of several tasks", self._errors)

    @staticmethod
    async def _run(scope: anyio.CancelScope, work: Awaitable[None]) -> None:
        with scope:
            await work

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _forget(self, task: asyncio.Task[None]) -> None:
        scope = self._scopes.pop(task)
        if not task.cancelled():
            error = task.exception()
        else:
            error = None if scope.cancel_called else RuntimeError("a task was cancelled by a library, not by fleetbus")
        if error is not None:
            self._errors.append(error)
        self._changed.set()


@asynccontextmanager
async def open_compact_task_group() -> AsyncGenerator[TaskGroup | CompactTasks]:
    """A task group for the length of the block, which ends after its last task; raises an exception group."""
    async with anyio.create_task_group() as group:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            yield group
            return
        tasks = CompactTasks()
        group.start_soon(tasks.supervise)
        try:
            yield tasks
        finally:
            tasks.close()
