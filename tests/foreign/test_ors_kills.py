"""Episodes on a server of the Open Reward Standard while the workers that play them and the server are killed: none is lost or
doubled, and what the server lost is excluded with its reason.

Kills follow results, not the clock: on a busy machine a worker that is killed every few seconds plays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus_schemas import EpisodeFinished, Task
from tests.agents.test_agents_under_kills import SUBJECTS, run_log
from tests.foreign.killed_workers import Workers, play_all
from tests.support.ors_process import ors_server
from tests.support.ors_server import REAL, OrsDouble, ors_double
from tests.support.processes import children
from tests.support.rule_policy import format_tool_call

GIVEN = sorted(REAL["WORDS"])[:5]
LINES = (format_tool_call("compare", first="a", second="b"),) * 2 + (format_tool_call("submit", words=GIVEN),)
EPISODES = 150
KILLED_AFTER = (20, 60, 100)
"""Results after which the server is killed, while other episodes are in the middle."""

WORKER_KILLED_EVERY = 15
"""Results after which the worker that stored the last of them is killed: it plays others, and its successor has to start."""

LOST = {"SessionGone", "Unreachable", "Refused"}


def compute_reward(index: int) -> float:
    right = sorted(REAL["draw_order"](index))
    return sum(a == b for a, b in zip(GIVEN, right, strict=True)) / 5 - 0.02


async def play(store: Path, spec: str, kill_server: Callable[[], Awaitable[None]]) -> list[list[EpisodeFinished]]:
    """The results of all episodes, with balanced books; meanwhile workers and the server are killed."""
    tasks = [
        Task(key=f"t{number}", prompt="WORLD=order", config={"split": "train", "index": number % 50})
        for number in range(EPISODES)
    ]
    async with run_log(store) as (url, bus):
        with Workers(url, spec, {"order": LINES}) as workers, anyio.fail_after(500):

            async def kill(count: int, result: EpisodeFinished) -> None:
                if count in KILLED_AFTER:
                    await kill_server()
                if count % WORKER_KILLED_EVERY == 0:
                    await workers.kill(result.worker)

            results = await play_all(bus, tasks, kill)
        report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    return results


def check_results(results: list[list[EpisodeFinished]]) -> None:
    assert len(results) == EPISODES
    outcomes: Counter[str] = Counter()
    for number, [result] in enumerate(results):
        outcomes[f"{result.outcome} {result.error_class}".strip()] += 1
        if result.outcome == "completed":
            assert result.reward == pytest.approx(compute_reward(number % 50)) and result.turns == 3
        else:
            assert (result.outcome, result.reward) == ("env_failed", None)
            assert result.error_class in LOST and result.error
    taken_over = sum(stored[0].attempt > 1 for stored in results)
    print(f"{len(results)} episodes, {taken_over} taken over, {dict(outcomes)}")
    assert taken_over and outcomes["completed"] > EPISODES // 3
    assert sum(outcomes.values()) > outcomes["completed"], "the server was killed in the middle of some"


async def kill_double(double: OrsDouble) -> None:
    await double.server.kill()
    await anyio.sleep(0.5)
    await double.server.start()


@pytest.mark.integration
@pytest.mark.timeout(600)
async def test_episodes_are_neither_lost_nor_doubled_while_workers_and_the_server_are_killed(tmp_path: Path) -> None:
    async with ors_double() as double:
        results = await play(tmp_path, f"ors:{double.url}#order", partial(kill_double, double))
    check_results(results)
    graded = [count for name, count in double.counts.items() if name.endswith(" submit")]
    assert len(graded) >= sum(stored[0].outcome == "completed" for stored in results) and set(graded) == {1}
    assert not children()


@pytest.mark.foreign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["ors", "openreward"])
async def test_the_same_with_the_package_s_own_server(package: str, tmp_path: Path) -> None:
    with ExitStack() as servers:
        address = servers.enter_context(ors_server(package))

        def restart() -> None:
            servers.close()
            servers.enter_context(ors_server(package, port=int(address.rpartition(":")[2])))

        results = await play(tmp_path, f"ors:{address}#order", partial(anyio.to_thread.run_sync, restart))
    check_results(results)
    assert not children()
