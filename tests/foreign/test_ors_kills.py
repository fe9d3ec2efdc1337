"""Episodes on a server of the Open Reward Standard while the workers that play them and the server are killed: none is lost or
doubled, and what the server lost is excluded with its reason.

Kills follow results, not the clock: on a busy machine a worker that is killed every few seconds plays nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, PolicyPublished, Task, encode
from tests.agents.test_agents_under_kills import RUN, SUBJECTS, build_request
from tests.agents.test_agents_under_kills import WORKER as PLAIN_WORKER
from tests.support.ors_process import ors_server
from tests.support.ors_server import REAL, OrsDouble, ors_double
from tests.support.processes import children
from tests.support.rule_policy import format_tool_call
from tests.support.servers import connect, run_server

GIVEN = sorted(REAL["WORDS"])[:5]
LINES = (format_tool_call("compare", first="a", second="b"),) * 2 + (format_tool_call("submit", words=GIVEN),)
WORKER = PLAIN_WORKER.replace(
    "from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate",
    "from tests.support.rule_policy import RuleSampler, RuleTemplate as ScriptedTemplate",
).replace("ScriptedSampler(delay=lambda request: 0.05)", f"RuleSampler({{'order': {LINES!r}}}, seconds=0.3)")
EPISODES = 150
KILLED_AFTER = (20, 60, 100)
"""Results after which the server is killed, while other episodes are in the middle."""

WORKER_KILLED_EVERY = 15
"""Results after which the worker that stored the last of them is killed: it plays others, and its successor has to start."""

LOST = {"SessionGone", "Unreachable", "Refused"}


def compute_reward(index: int) -> float:
    right = sorted(REAL["draw_order"](index))
    return sum(a == b for a, b in zip(GIVEN, right, strict=True)) / 5 - 0.02


@contextmanager
def worker(role: str, name: str, url: str, spec: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WORKER, role, name, url, spec]) as process:
        try:
            yield process
        finally:
            process.kill()


class Workers:
    """Two environment workers; for one that is killed another is started."""

    def __init__(self, url: str, spec: str) -> None:
        self._url, self._spec = url, spec
        self._held = ExitStack()
        self._playing: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0

    def __enter__(self) -> Workers:
        for _ in range(2):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _start(self) -> None:
        name, self._count = f"e{self._count}", self._count + 1
        self._playing[name] = self._held.enter_context(worker("environment", name, self._url, self._spec))

    async def kill(self, name: str) -> None:
        """Harmless if it is killed already: what it stored before may be read after."""
        if (process := self._playing.pop(name, None)) is not None:
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            self._start()


@asynccontextmanager
async def fleet(store: Path, spec: str) -> AsyncIterator[tuple[str, Bus]]:
    async with run_server(store) as server, connect(server.url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=16, max_bytes=2 << 30))
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(policy))
        with worker("inference", "i0", server.url, spec):
            yield server.url, bus


async def ask(bus: Bus, number: int) -> None:
    task = Task(key=f"t{number}", prompt="WORLD=order", config={"split": "train", "index": number % 50})
    request = msgspec.structs.replace(build_request(bus, f"a{number}"), task=task)
    await bus.publish(SUBJECTS.task("default", f"a{number}"), encode(request), expected_last=0)


async def play_all(
    bus: Bus, kill_server: Callable[[], Awaitable[None]], kill_worker: Callable[[str], Awaitable[None]]
) -> dict[str, list[EpisodeFinished]]:
    """Keep sixteen out until all have ended, and kill meanwhile."""
    results: dict[str, list[EpisodeFinished]] = {}
    asked = 0
    async with bus.read([SUBJECTS.episodes]) as reader:
        while len(results) < EPISODES:
            while asked < EPISODES and asked - len(results) < 16:
                await ask(bus, asked)
                asked += 1
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                results.setdefault(entry.episode_id, []).append(entry)
                if len(results[entry.episode_id]) == 1:
                    if len(results) in KILLED_AFTER:
                        await kill_server()
                    if len(results) % WORKER_KILLED_EVERY == 0:
                        await kill_worker(entry.worker)
    return results


def check_results(results: dict[str, list[EpisodeFinished]]) -> None:
    assert len(results) == EPISODES and all(len(stored) == 1 for stored in results.values())
    outcomes: Counter[str] = Counter()
    for number in range(EPISODES):
        [result] = results[f"a{number}"]
        outcomes[f"{result.outcome} {result.error_class}".strip()] += 1
        if result.outcome == "completed":
            assert result.reward == pytest.approx(compute_reward(number % 50)) and result.turns == 3
        else:
            assert (result.outcome, result.reward) == ("env_failed", None)
            assert result.error_class in LOST and result.error
    taken_over = sum(stored[0].attempt > 1 for stored in results.values())
    print(f"{len(results)} episodes, {taken_over} taken over, {dict(outcomes)}")
    assert taken_over and outcomes["completed"] > EPISODES // 3
    assert sum(outcomes.values()) > outcomes["completed"], "the server was killed in the middle of some"


async def kill_double(double: OrsDouble) -> None:
    await double.server.kill()
    await anyio.sleep(0.5)
    await double.server.start()


@pytest.mark.integration
@pytest.mark.timeout(400)
async def test_episodes_are_neither_lost_nor_doubled_while_workers_and_the_server_are_killed(tmp_path: Path) -> None:
    async with ors_double() as double:
        spec = f"ors:{double.url}#order"
        async with fleet(tmp_path, spec) as (url, bus):
            with Workers(url, spec) as workers, anyio.fail_after(300):
                results = await play_all(bus, partial(kill_double, double), workers.kill)
            report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    check_results(results)
    graded = [count for name, count in double.counts.items() if name.endswith(" submit")]
    assert len(graded) >= sum(stored[0].outcome == "completed" for stored in results.values()) and set(graded) == {1}
    assert not children()


@pytest.mark.foreign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["ors", "openreward"])
async def test_the_same_with_the_package_s_own_server(package: str, tmp_path: Path) -> None:
    with ExitStack() as servers:
        address = servers.enter_context(ors_server(package))
        port, spec = int(address.rpartition(":")[2]), f"ors:{address}#order"

        def restart() -> None:
            servers.close()
            servers.enter_context(ors_server(package, port=port))

        async with fleet(tmp_path, spec) as (url, bus):
            with Workers(url, spec) as workers, anyio.fail_after(500):
                results = await play_all(bus, partial(anyio.to_thread.run_sync, restart), workers.kill)
            report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    check_results(results)
    assert not children()
