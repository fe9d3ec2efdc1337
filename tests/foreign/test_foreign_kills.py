"""Episodes of another package on a real server while the workers that play them are killed: none is lost or doubled.

Packages that the starter policy can play are killed where they are trained: `test_training_under_kills`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Task, encode
from tests.agents.test_agents_under_kills import SUBJECTS, WORKER, build_request, fleet, kill_in_turn, run_log
from tests.foreign.killed_workers import Workers
from tests.foreign.killed_workers import play_all as play_tasks
from tests.foreign.trained_cases import BFCL, TAU2, V1
from tests.support.processes import children

GUESS = Path(__file__).parent / "stand_in" / "guess"
SPEC = f"verifiers+python={sys.executable}:{GUESS} turns=4"
EPISODES = 150
GAMES, KILLED_EVERY = 40, 4
"""Of the real package, and results after which a worker is killed: it plays others."""

FAILING = 5
"""Every so many episodes one is an error of the package's."""


@contextmanager
def worker(name: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WORKER, "environment", name, url, SPEC]) as process:
        try:
            yield process
        finally:
            process.kill()


async def ask(bus: Bus, number: int) -> None:
    task = Task(key=f"t{number}", prompt="", config={"index": 0 if number % FAILING else 1})
    request = msgspec.structs.replace(build_request(bus, f"a{number}"), task=task)
    await bus.publish(SUBJECTS.task("default", f"a{number}"), encode(request), expected_last=0)


async def play_all(bus: Bus, count: int, at_once: int) -> dict[str, list[EpisodeFinished]]:
    """Keep so many out until all have ended."""
    results: dict[str, list[EpisodeFinished]] = {}
    asked = 0
    async with bus.read([SUBJECTS.episodes]) as reader:
        while len(results) < count:
            while asked < count and asked - len(results) < at_once:
                await ask(bus, asked)
                asked += 1
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                results.setdefault(entry.episode_id, []).append(entry)
    return results


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_episodes_of_another_package_are_neither_lost_nor_doubled_while_workers_are_killed(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (url, bus):
        async with anyio.create_task_group() as group:
            names = (f"e{number}" for number in range(1000))
            group.start_soon(kill_in_turn, lambda _: worker(next(names), url), 16, 4)
            with anyio.fail_after(240):
                results = await play_all(bus, count=EPISODES, at_once=16)
            group.cancel_scope.cancel()
        report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    assert all(len(stored) == 1 for stored in results.values())
    failed = {number for number in range(EPISODES) if number % FAILING == 0}
    for number in range(EPISODES):
        [result] = results[f"a{number}"]
        if number in failed:
            assert (result.outcome, result.reward) == ("env_failed", None) and "ToolError" in result.error
        else:
            assert (result.outcome, result.reward, result.turns) == ("completed", 0.0, 4), result.error
    taken_over = sum(stored[0].attempt > 1 for stored in results.values())
    print(f"{len(results)} episodes, {taken_over} taken over")
    assert taken_over
    assert not children()


CONTRACT = 'Two and two.\n{"problem": "2+2?", "answer": 4}'
"""What a proposer of verifiers' `proposer_solver` has to say, and a right answer of its solver's: the last number counts.
A problem that is always solved pays its proposer nothing."""


class Played(NamedTuple):
    """``said`` is what the policy says turn by turn, the last over and over; ``seats``: their rewards, if they are the same
    for all tasks."""

    spec: str
    said: tuple[str, ...]
    place: Callable[[int], dict[str, Any]]
    seats: frozenset[tuple[str, float]] = frozenset()


BOTH = "proposer.harness.id=in_process solver.harness.id=in_process"
SOLVED = frozenset({("proposer", 0.0), ("solver", 1.0)})
PLAYED = {
    "proposer_solver": Played(
        f"verifiers+python={V1}:proposer_solver role=all {BOTH}", (CONTRACT,), lambda number: {"index": number % 6}, SOLVED
    ),
    "bfcl": Played(f"bfcl+python={BFCL}:multi_turn", ("Done.",), lambda number: {"id": f"multi_turn_base_{number}"}),
    "tau2": Played(f"tau2+python={TAU2}:retail", ("I need help.", "###STOP###"), lambda number: {"id": f"{number}"}),
}


@pytest.mark.foreign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLAYED)
async def test_scripted_episodes_are_neither_lost_nor_doubled_while_workers_are_killed(name: str, tmp_path: Path) -> None:
    spec, said, place, seats = PLAYED[name]
    tasks = [Task(key=f"t{number}", prompt="", config=place(number)) for number in range(GAMES)]
    async with run_log(tmp_path) as (url, bus):
        with Workers(url, spec, {"": said}) as workers, anyio.fail_after(1500):

            async def kill(count: int, result: EpisodeFinished) -> None:
                if count % KILLED_EVERY == 0:
                    await workers.kill_inference() if count % (3 * KILLED_EVERY) == 0 else await workers.kill(result.worker)

            results = await play_tasks(bus, tasks, kill)
        report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    taken_over = sum(each.attempt > 1 for [each] in results)
    print(name, Counter((each.outcome, each.reward, each.error) for [each] in results), f"{taken_over} taken over")
    assert {each.outcome for [each] in results} == {"completed"} and taken_over
    assert not seats or {(seat.name, seat.reward) for [each] in results for seat in each.seats} == seats
    assert not children()
