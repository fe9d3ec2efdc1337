"""The page's comparison of evaluations: that of the command, in pages, of this run and of others, within its limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.diagnosis.comparison import Graded, compare
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.monitor import compared_evaluations
from fleetbus_workers.observe.monitor.compared_evaluations import Compared, ComparedEvaluations, OpenRun
from tests.support.evaluated_run import publish_evaluation

TASKS = {f"task-{number}": number / 10 for number in range(8)}
GAINS = {task: reward + (0.1 if index % 2 else -0.3) for index, (task, reward) in enumerate(TASKS.items())}


@asynccontextmanager
async def evaluated(run: str) -> AsyncIterator[Bus]:
    async with MemoryServer().connect(run, worker="w") as bus:
        await bus.declare(plan_run(run, lanes=1))
        await publish_evaluation(bus, run, "start", TASKS)
        await publish_evaluation(bus, run, "end", GAINS)
        yield bus


def page_of(bus: Bus, runs: Path, open_run: OpenRun | None = None) -> ComparedEvaluations:
    return ComparedEvaluations(bus, Subjects("run"), runs, open_run, success_threshold=1.0)


async def ask(page: ComparedEvaluations, *, offset: int = 0, limit: int = 100, **query: str) -> Compared:
    with anyio.fail_after(30):
        return await page.get(query, offset=offset, limit=limit)


async def test_without_a_choice_the_newest_evaluation_is_compared_with_the_first_as_the_command_does(tmp_path: Path) -> None:
    async with evaluated("run") as bus:
        page = page_of(bus, tmp_path)
        found = await ask(page, limit=3, offset=1)
        await publish_evaluation(bus, "run", "later", dict.fromkeys(TASKS, 1.0))
        later = await ask(page, one="@end")

    sides = [[Graded("", task, reward, reward >= 1) for task, reward in side.items()] for side in (TASKS, GAINS)]
    expected = compare(*sides, names=("run@start", "run@end"))
    assert found.problem == "" and found.comparison is not None and found.evaluations == {"run": ["start", "end"]}
    assert (found.comparison.reward, found.comparison.success) == (expected.reward, expected.success)
    assert found.comparison.tasks == expected.tasks[1:4] and found.total == len(TASKS)
    assert later.comparison is not None and (later.comparison.one, later.comparison.other) == ("run@end", "run@later")


async def test_tasks_are_sorted_by_what_is_asked_for(tmp_path: Path) -> None:
    async with evaluated("run") as bus:
        page = page_of(bus, tmp_path)
        for sort, attribute in (("", "difference"), ("-difference", "difference"), ("-one", "one"), ("nothing", "difference")):
            found = await ask(page, sort=sort)
            assert found.comparison is not None
            values = [getattr(each, attribute) for each in found.comparison.tasks]
            assert values == sorted(values, reverse=sort.startswith("-")), sort


class Runs:
    """Other runs, each opened as often as is asked for."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.opened: list[str] = []
        for name in names:
            (folder / name).mkdir()
            (folder / name / "summary.json").write_text("{}")

    def open(self, run: str) -> AbstractAsyncContextManager[Bus]:
        self.opened.append(run)
        return evaluated(run)


async def test_another_run_is_read_once_a_minute_and_one_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path, *(f"other{number}" for number in range(6)))
    async with evaluated("run") as bus:
        page = page_of(bus, tmp_path, runs.open)
        for _ in range(2):
            found = await ask(page, one="other1@start")
            assert found.comparison is not None and found.comparison.one == "other1@start" and found.others[1] == "other1"
        assert runs.opened == ["other1"]
        gone = await ask(page, one="gone")
        assert gone.comparison is None and gone.problem == "no run gone on this machine has ended yet"
        for number in range(6):
            await ask(page, one=f"other{number}")
        assert len(page._others) == compared_evaluations.OTHER_RUNS
        monkeypatch.setattr(compared_evaluations, "FRESH_SECONDS", 0.0)
        await ask(page, one="other5")
    assert runs.opened == ["other1", "other0", "other2", "other3", "other4", "other5", "other5"]


async def test_what_cannot_be_compared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with evaluated("run") as bus:
        page = page_of(bus, tmp_path)
        assert (await ask(page, other="@step7")).problem == "run has no graded evaluation step7; it has start, end"
        same = "run@end stands on both sides: choose another evaluation, or another run"
        assert (await ask(page, one="@end")).problem == same
        assert (await ask(page, one="other")).problem == "no run other on this machine has ended yet"
        monkeypatch.setattr(compared_evaluations, "MAX_GRADED", 3)
        assert (await ask(page)).problem == "run run has too many held-out episodes for the page: fleetbus compare"


async def test_a_run_whose_files_are_not_served_in_time_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_evaluations, "OPEN_SECONDS", 0.05)
    monkeypatch.setattr(compared_evaluations, "READ_SECONDS", 0.05)
    Runs(tmp_path, "slow", "broken")

    @asynccontextmanager
    async def open_slowly(run: str) -> AsyncIterator[Bus]:
        if run == "broken":
            raise UserError("the log of run broken cannot be read")
        await anyio.sleep_forever()
        async with evaluated(run) as bus:
            yield bus

    async with evaluated("run") as bus:
        page = page_of(bus, tmp_path, open_slowly)
        assert (await ask(page, one="slow")).problem == "the log of run slow was not served within 0.05 s: try again"
        assert (await ask(page, one="broken")).problem == "the log of run broken cannot be read"
