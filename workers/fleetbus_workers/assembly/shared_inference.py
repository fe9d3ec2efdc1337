"""One process that serves several runs: a part for each, with its own connection, key and engine; they share the slots.

A part that fails ends no other: the reason is logged with the name of its run, and the part is tried again after a pause that
doubles. When all parts that are left fail, the process ends as the last one did, for its supervisor to see. A part that was
drained by its own run's operator is not tried again (docs/decisions/0223-an-inference-worker-for-several-runs.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import msgspec
import structlog

from fleetbus.config.settings import Configuration
from fleetbus.delivery.fair_shares import Share
from fleetbus.delivery.shared_slots import SharedSlots
from fleetbus.errors import BusError, UserError, iterate_leaves
from fleetbus_workers.assembly.work import Work, serve_role

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0

log = structlog.get_logger()


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a shared worker serves: its own configuration, the server to find it on, and its part of the slots."""

    configuration: Configuration
    url: str
    share: Share

    @property
    def name(self) -> str:
        return self.configuration.run.name


ServePart = Callable[[ServedRun, SharedSlots, anyio.Event], Awaitable[None]]
"""The worker of one run, until it is drained or fails."""


def serve_part(work: Callable[..., Awaitable[None]], name: str) -> ServePart:
    """The part that connects with the run's key and does ``work`` there under ``name``."""

    async def serve(run: ServedRun, shared: SharedSlots, drain: anyio.Event) -> None:
        part: Work = partial(work, shared=shared)  # type: ignore[assignment]
        await serve_role("inference", part, run.configuration, name, run.url, drain)

    return serve


async def serve_runs(runs: Sequence[ServedRun], serve: ServePart, *, slots: int, drain: anyio.Event) -> None:
    """Serve all runs until ``drain`` is set or all were drained one by one. Raises what ended the last part when none is left
    that works."""
    parts = _Parts(runs, serve, SharedSlots(slots, {run.name: run.share for run in runs}))
    async with anyio.create_task_group() as group:
        group.start_soon(parts.drain_with, drain)
        async with anyio.create_task_group() as serving:
            for run in runs:
                serving.start_soon(parts.keep_serving, run)
        group.cancel_scope.cancel()


class _Parts:
    def __init__(self, runs: Sequence[ServedRun], serve: ServePart, shared: SharedSlots) -> None:
        self._serve = serve
        self._shared = shared
        self._drains = {run.name: anyio.Event() for run in runs}
        self._unfinished = set(self._drains)
        self._is_draining = False
        self._failing: set[str] = set()

    async def drain_with(self, drain: anyio.Event) -> None:
        await drain.wait()
        self._is_draining = True
        for each in self._drains.values():
            each.set()

    async def keep_serving(self, run: ServedRun) -> None:
        structlog.contextvars.bind_contextvars(run=run.name)
        pause, told, drain = FIRST_PAUSE_SECONDS, "", self._drains[run.name]
        while not drain.is_set():
            try:
                await self._serve(run, self._shared, drain)
                break
            except Exception as error:  # supervised here: one run's failure, of any kind, is told and ends no other's work
                if self._shared.take_joined(run.name):
                    self._failing.discard(run.name)
                    pause, told = FIRST_PAUSE_SECONDS, ""
                self._failing.add(run.name)
                reason = "; ".join(f"{leaf}" or type(leaf).__name__ for leaf in iterate_leaves(error))
                if reason != told:
                    self._tell(error, reason)
                told = reason
                if all(each in self._failing and not self._shared.is_served(each) for each in self._unfinished):
                    raise
            with anyio.move_on_after(pause):
                await drain.wait()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._unfinished.discard(run.name)
        if not self._is_draining and self._unfinished:
            log.info("run drained; the other runs are served on", left=len(self._unfinished))

    def _tell(self, error: Exception, reason: str) -> None:
        words = "run cannot be served; the others are served on, and it is tried again"
        if all(isinstance(leaf, UserError | BusError) for leaf in iterate_leaves(error)):
            log.error(words, reason=reason)
        else:
            log.exception(words)
