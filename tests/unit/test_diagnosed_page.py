"""The page's diagnosis: that of the command, brought up to date from where it ended, and not more often than it may cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Message, encode
from fleetbus_workers.observe.monitor import diagnosed_run
from fleetbus_workers.observe.monitor.diagnosed_run import DiagnosedRun as PageDiagnosis
from tests.support.diagnosed_run import SUBJECTS, DiagnosedRun, find_subject


def lose_tokens(step: int, metrics: dict[str, float]) -> None:
    if step >= 6:
        metrics["logprob_difference_mean"] = 0.004 * (step - 5)


async def tell(bus: Bus, messages: Iterator[Message], count: int = 10**9) -> None:
    for _, message in zip(range(count), messages, strict=False):
        await bus.publish(find_subject(message), encode(message))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosed_run, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(diagnosed_run, "TIMES_ITS_COST", 0.0)


@pytest.mark.integration
async def test_it_follows_the_log_and_says_what_the_command_says() -> None:
    async with MemoryServer().connect("run", worker="w") as bus:
        await bus.declare(plan_run("run", lanes=1))
        messages = DiagnosedRun(1, steps=14, plant_metrics=lose_tokens).messages()
        page = PageDiagnosis(bus, SUBJECTS, "default")
        await tell(bus, messages, 1 + 3 * (4 * 64 + 1))
        first = (await page.get()).diagnosis
        await tell(bus, messages)
        last = (await page.get()).diagnosis

    expected = DiagnosedRun(1, steps=14, plant_metrics=lose_tokens).diagnose()
    assert first is not None and last is not None
    assert (first.last_step, first.findings) == (3, ())
    assert [(each.kind, each.step) for each in last.findings] == [(each.kind, each.step) for each in expected.findings]
    assert last.measures == expected.measures


async def test_it_is_not_computed_again_before_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosed_run, "SECONDS_BETWEEN", 1000.0)
    async with MemoryServer().connect("run", worker="w") as bus:
        await bus.declare(plan_run("run", lanes=1))
        messages = DiagnosedRun(1, steps=3).messages()
        page = PageDiagnosis(bus, SUBJECTS, "default")
        await tell(bus, messages, 1 + 2 * (4 * 64 + 1))
        before = await page.get()
        await tell(bus, messages)
        assert (await page.get()).diagnosis is before.diagnosis and before.diagnosis is not None


async def test_a_log_that_is_too_long_is_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosed_run, "MAX_ENTRIES", 10)
    async with MemoryServer().connect("run", worker="w") as bus:
        await bus.declare(plan_run("run", lanes=1))
        await tell(bus, DiagnosedRun(1, steps=1).messages())
        found = await PageDiagnosis(bus, SUBJECTS, "default").get()
    assert found.diagnosis is None and found.problem == "the log is too long for the page: fleetbus diagnose run"


async def test_a_log_that_is_not_read_in_time_is_answered_with_how_far_it_was_read_and_read_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosed_run, "READ_SECONDS", 0.3)
    async with MemoryServer().connect("run", worker="w") as bus:
        await bus.declare(plan_run("run", lanes=1))
        await tell(bus, DiagnosedRun(1, steps=2).messages())
        last, scan = (await bus.log_state()).last_sequence, bus.scan

        async def scan_and_hang(subjects: list[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
            async for entry in scan(subjects, start=start):
                yield entry
                if start < last // 2 <= entry.sequence:
                    await anyio.sleep_forever()

        monkeypatch.setattr(bus, "scan", scan_and_hang)
        page = PageDiagnosis(bus, SUBJECTS, "default")
        with anyio.fail_after(30):
            first, second = await page.get(), await page.get()

    assert first.diagnosis is None and first.problem == "reading the log: 50%"
    assert second.diagnosis is not None and second.diagnosis.last_step == 2


async def test_another_log_of_the_run_is_folded_anew_although_it_is_longer() -> None:
    servers = MemoryServer(), MemoryServer()
    async with servers[0].connect("run", worker="w") as old, servers[1].connect("run", worker="w") as new:
        for bus, seed, steps in ((old, 2, 2), (new, 3, 3)):
            await bus.declare(plan_run("run", lanes=1))
            await tell(bus, DiagnosedRun(seed, steps=steps).messages())
        page = PageDiagnosis(old, SUBJECTS, "default")
        before = (await page.get()).diagnosis
        page._bus = new
        after = (await page.get()).diagnosis

    assert before == DiagnosedRun(2, steps=2).diagnose()
    assert after is not None and after.measures == DiagnosedRun(3, steps=3).diagnose().measures
