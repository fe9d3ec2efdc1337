"""Two evaluations task by task, of the run that the page shows or of others on this machine: `fleetbus compare`, in pages.

One comparison is made at a time. Each reads for some seconds at most, and says how far it came; a run that is not shown is
served from its files meanwhile, and its log is not read again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import Bus, LogBus
from fleetbus.core.diagnosis.comparison import Comparison, GradedFold, compare, find_evaluation, list_evaluations
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.monitor.followed_log import FollowedLog
from fleetbus_workers.observe.monitor.other_runs import list_other_runs

READ_SECONDS = 10.0
"""A request reads each of its logs so long."""

OPEN_SECONDS = 20.0
"""The files of a run are served within so many seconds, or not."""

FRESH_SECONDS = 60.0
"""The log of a run that is not shown is not read again before."""

OTHER_RUNS = 4
"""Of so many runs beside the shown one the episodes are kept."""

MAX_GRADED = 200_000
"""Held-out episodes of one run; more are compared by the command."""

SORTABLE = ("difference", "task", "one", "other")

OpenRun = Callable[[str], AbstractAsyncContextManager[Bus]]
"""Connects to the run of a name; raises `UserError`."""


class Compared(msgspec.Struct, kw_only=True):
    """The answer to the page. ``evaluations`` of the runs that are compared, oldest first; ``tasks`` of ``comparison`` are one
    page of ``total``; ``problem``: why there is none."""

    run: str
    others: list[str]
    evaluations: dict[str, list[str]] = {}
    comparison: Comparison | None = None
    total: int = 0
    problem: str = ""


class ComparedEvaluations:
    """Evaluations of the run behind ``bus``, and with ``open_run`` of those in the folder ``runs``."""

    def __init__(
        self, bus: LogBus, subjects: Subjects, runs: Path, open_run: OpenRun | None, *, success_threshold: float
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._runs = runs
        self._open_run = open_run
        self._threshold = success_threshold
        self._lock = anyio.Lock()
        self._own = self._begin(subjects.run)
        self._others: dict[str, tuple[float, FollowedLog[GradedFold]]] = {}

    def _begin(self, run: str) -> FollowedLog[GradedFold]:
        return FollowedLog([Subjects(run).episodes], lambda: GradedFold(success_threshold=self._threshold))

    async def get(self, query: Mapping[str, str], *, offset: int, limit: int) -> Compared:
        """Query: ``one`` and ``other``, each ``RUN@EVALUATION`` or a part of it: without a run that which is shown, without an
        evaluation the newest that was sampled, for ``one`` of the same run as ``other`` the first. ``sort`` by a name of
        `SORTABLE`, with ``-`` before it from the largest on."""
        async with self._lock:
            own = self._subjects.run
            others = await anyio.to_thread.run_sync(list_other_runs, self._runs, own) if self._open_run else []
            answer = Compared(run=own, others=others)
            try:
                await self._compare(answer, query)
            except (BusError, UserError) as error:
                answer.problem = str(error)
        if answer.comparison is not None:
            answer.total = len(answer.comparison.tasks)
            answer.comparison = _choose_tasks(answer.comparison, query.get("sort", ""), offset, limit)
        return answer

    async def _compare(self, answer: Compared, query: Mapping[str, str]) -> None:
        sides = [_split(query.get(name, ""), answer.run) for name in ("one", "other")]
        graded = {}
        for run in dict.fromkeys(run for run, _ in sides):
            graded[run] = (await self._read(run, answer.others)).build()
            answer.evaluations[run] = list_evaluations(graded[run])
        (one, before), (other, after) = sides
        if not before and one == other and answer.evaluations[one]:
            before = answer.evaluations[one][0]
        chosen = find_evaluation(one, before, graded[one]), find_evaluation(other, after, graded[other])
        names = chosen[0][0], chosen[1][0]
        if names[0] == names[1]:
            raise UserError(f"{names[0]} stands on both sides: choose another evaluation, or another run")
        answer.comparison = await anyio.to_thread.run_sync(lambda: compare(chosen[0][1], chosen[1][1], names=names))

    async def _read(self, run: str, others: list[str]) -> GradedFold:
        """The graded episodes of a run. Raises `UserError` for one that is not known, is too large or not yet read."""
        if run == self._subjects.run:
            return await self._advance(run, self._own, self._bus)
        if self._open_run is None or run not in others:
            raise UserError(f"no run {run} on this machine has ended yet")
        read_at, followed = self._others.pop(run, (-FRESH_SECONDS, self._begin(run)))
        while len(self._others) >= OTHER_RUNS:
            del self._others[next(iter(self._others))]
        if anyio.current_time() - read_at >= FRESH_SECONDS:
            with anyio.move_on_after(OPEN_SECONDS + READ_SECONDS) as opening:
                self._others[run] = (-FRESH_SECONDS, followed)
                async with self._open_run(run) as bus:
                    await self._advance(run, followed, bus)
                read_at = anyio.current_time()
            if opening.cancelled_caught:
                raise UserError(f"the log of run {run} was not served within {OPEN_SECONDS:g} s: try again")
        self._others[run] = (read_at, followed)
        return followed.fold

    async def _advance(self, run: str, followed: FollowedLog[GradedFold], bus: LogBus) -> GradedFold:
        share = await followed.advance(bus, await bus.log_state(), READ_SECONDS)
        if len(followed.fold) > MAX_GRADED:
            followed.forget()
            raise UserError(f"run {run} has too many held-out episodes for the page: fleetbus compare")
        if share < 1:
            raise UserError(f"reading the log of run {run}: {share:.0%}; ask again to read on")
        return followed.fold


def _split(text: str, run: str) -> tuple[str, str]:
    name, _, evaluation = text.partition("@")
    return name or run, evaluation


def _choose_tasks(comparison: Comparison, sort: str, offset: int, limit: int) -> Comparison:
    name = sort.removeprefix("-")
    tasks = comparison.tasks
    if name in SORTABLE and sort != "difference":
        tasks = tuple(sorted(tasks, key=lambda each: getattr(each, name), reverse=sort.startswith("-")))
    return msgspec.structs.replace(comparison, tasks=tasks[offset : offset + limit])
