"""MiniWoB++ as BrowserGym plays it, and ScienceWorld, in the classes of ``docs/examples``: rewards as with the packages
alone, and no episode lost or doubled when a worker is killed in the middle. ``just test-worlds`` makes the interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Observation, Task, decode, encode
from fleetbus_workers.environment.specs import build_environment_factory
from tests.agents.test_agents_under_kills import SUBJECTS, WORKER, build_request, fleet
from tests.foreign.playing import act
from tests.foreign.recorded_worlds import PATIENT, Game, load_games
from tests.support.processes import children, until

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
ALONE = Path(__file__).with_name("worlds_alone.py")
SPECS = {"miniwob": f"pool:{EXAMPLES}/web_tasks.py:MiniWob", "scienceworld": f"{EXAMPLES}/science.py:Science"}
NEEDS = {"miniwob": "browsergym", "scienceworld": "scienceworld"}
CONFIGS: dict[str, dict[str, Any]] = {
    "miniwob": {"id": "click-button", **PATIENT},
    "scienceworld": {"name": "find-plant", "variation": 0},
}
KEPT = ("chrom", "java", "playwright")
EPISODES = {"miniwob": 2, "scienceworld": 4}
TURNS, AT_A_TIME = 3, 4

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # ScienceWorld leaves its files to the garbage collector
]
names = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"needs {package}"))
        for name, package in NEEDS.items()
    ],
)


@names
async def test_recorded_games_are_paid_as_the_package_pays_them_alone(name: str, tmp_path: Path) -> None:
    games = load_games(name)
    (tmp_path / "games.json").write_text(json.dumps([game[:3] for game in games]))
    command = [sys.executable, str(ALONE), name, str(tmp_path / "games.json")]
    done = await anyio.run_process(command, stderr=None)
    assert json.loads(done.stdout) == [game.rewards for game in games]


@names
async def test_the_class_pays_each_step_of_a_recorded_game_as_the_package_does(name: str) -> None:
    games = load_games(name)
    factory: Any = build_environment_factory(SPECS[name], verifier=None)  # type: ignore[arg-type]
    played: list[Any] = [None] * len(games)
    gate = anyio.CapacityLimiter(AT_A_TIME)

    async def play_one(number: int) -> None:
        async with gate:
            played[number] = await play(factory, games[number])

    async with factory.run(), anyio.create_task_group() as group:
        for number in range(len(games)):
            group.start_soon(play_one, number)
    assert [rewards for rewards, _ in played] == [game.rewards for game in games]
    if name == "miniwob":
        assert [total for _, total in played] == [sum(game.rewards) for game in games]
    else:  # the score counts what the reset's look around is worth, too
        assert all(total >= sum(rewards) - 1e-9 for rewards, total in played)
    await until(lambda: not children())


async def play(factory: Any, game: Game) -> tuple[list[float], float]:
    """The rewards of the steps, and the verdict's; the episode ends where the recorded one does."""
    environment = factory()
    try:
        await environment.open(Task(key="t", prompt="", seed=game.seed, config=game.config))
        await environment.reset()
        steps = [await environment.step(act(turn, text)) for turn, text in enumerate(game.actions)]
        assert not any(step.terminated for step in steps[:-1])
        return [step.reward for step in steps], (await environment.verify()).reward
    finally:
        await environment.close()


@contextmanager
def worker(number: int, url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WORKER, "environment", f"e{number}", url, SPECS[name]]) as process:
        try:
            yield process
        finally:
            process.kill()


async def read_until(bus: Bus, count: int, kind: type) -> list[Any]:
    """So many entries of a kind from the log of episodes."""
    found: list[Any] = []
    async with bus.read([SUBJECTS.episodes]) as reader:
        while len(found) < count:
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, kind):
                found.append(entry)
    return found


async def wait_for_turns(bus: Bus) -> None:
    """Wait until an episode shows what its first action led to."""
    async with bus.read([SUBJECTS.observations()]) as reader:
        while decode(Observation, (await reader.receive()).payload).turn < 1:
            pass


@names
async def test_a_worker_that_is_killed_in_the_middle_costs_no_episode(name: str, tmp_path: Path) -> None:
    count = EPISODES[name]
    async with fleet(tmp_path) as (url, bus):
        for number in range(count):
            request = build_request(bus, f"a{number}")
            task = Task(key=f"t{number}", prompt="", seed=number, config=CONFIGS[name])
            request = msgspec.structs.replace(request, task=task, max_turns=TURNS)
            await bus.publish(SUBJECTS.task("default", f"a{number}"), encode(request), expected_last=0)
        with anyio.fail_after(600):
            with worker(0, url, name) as first:
                await wait_for_turns(bus)
                below = psutil.Process(first.pid).children(recursive=True)
                assert any(word in " ".join(each.cmdline()) for each in below for word in KEPT)
                first.kill()
            await until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
            with worker(1, url, name):
                results = await read_until(bus, count, EpisodeFinished)
        report = await audit_run(bus, SUBJECTS)
    assert report.balanced, report.findings
    assert sorted(result.episode_id for result in results) == [f"a{number}" for number in range(count)]
    assert {(result.outcome, result.turns) for result in results} == {("truncated", TURNS)}
    taken_over = sum(result.attempt > 1 for result in results)
    print(name, f"{count} episodes, {taken_over} taken over")
    assert taken_over
    await until(lambda: not children())
