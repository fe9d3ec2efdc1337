"""What happens when …: one test or more per row of the table of failures, on virtual time, with the time to recover measured.

The learner's rows are in `test_failure_table_learner.py`, those of a real server and a real engine in
`test_failure_table_server.py` and `..._engine.py`; the full log is the recorder's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
import trio.testing

from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, TASK_LEASE_SECONDS
from fleetbus.config.settings import LimitSettings
from fleetbus.episodes import decoded
from fleetbus.lanes import LaneLost
from schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    PolicyPublished,
    Task,
    WorkerDraining,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
)
from tests.support.small_fleet import Member, SmallFleet, configured, small_fleet
from workers.environment.base import EnvironmentFailed, Step, Verdict
from workers.environment.scripted import ScriptedEnvironment
from workers.inference.base import EngineFailed, Generation, GenerationRequest, WeightsRejected
from workers.inference.scripted import ScriptedSampler

ENVIRONMENT_RECOVERY_SECONDS = TASK_LEASE_SECONDS + 2.0
INFERENCE_RECOVERY_SECONDS = OBSERVATION_LEASE_SECONDS + 2.0
LIFE = (WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed)
TURN_SECONDS = 1.0
TURNS = 6
PATIENT = LimitSettings(open=60, reset=60, step=60, action=60, verify=60, close=5, drain=10)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Unrepeatable(ScriptedEnvironment):
    """What it shows depends on more than the actions: it has to begin anew."""

    replayable = False


def slow_sampler() -> ScriptedSampler:
    return ScriptedSampler(delay=lambda _: TURN_SECONDS)


def long_task(turns: int = TURNS) -> Task:
    return Task(key="task", prompt="play", config={"turns": turns})


@asynccontextmanager
async def fleet_of(
    *, environments: int = 2, engines: int = 2, make: Callable[[], ScriptedEnvironment] = ScriptedEnvironment
) -> AsyncIterator[SmallFleet]:
    """Workers that take a second per turn; everything has to rest at the end, with one result per request."""
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            members = [fleet.environment(f"environment-{index}", make=make) for index in range(environments)]
            members += [fleet.inference(f"inference-{index}", sampler=slow_sampler()) for index in range(engines)]
            await fleet.heard(*members)
            yield fleet
            await fleet.rests()
            assert len(fleet.results) == len(fleet.requested), "an episode was lost"
            await one_action_per_turn(fleet)


async def one_action_per_turn(fleet: SmallFleet) -> None:
    turns = Counter((action.episode_id, action.attempt, action.turn) for action in await fleet.actions())
    assert set(turns.values()) <= {1}, "an action is stored twice"


async def begin(fleet: SmallFleet, count: int = 6, *, after: float = 2.5) -> list[str]:
    """Request episodes and let them get under way."""
    episodes = [f"e{index}" for index in range(count)]
    for episode in episodes:
        await fleet.request(episode, task=long_task())
    await anyio.sleep(after)
    return episodes


async def claimed_at(fleet: SmallFleet, episode: str, attempt: int) -> float:
    """When that attempt claimed, on anyio's clock."""
    entries = await fleet.bus.history([fleet.subjects.episode(episode)])
    offset = fleet.bus.now_ns() / 1e9 - anyio.current_time()
    claims = decoded(AttemptStarted, entries, beside=(EpisodeFinished,))
    return next(entry.time_ns / 1e9 - offset for entry, claim in claims if claim.attempt == attempt)


async def longest_pauses(fleet: SmallFleet) -> dict[str, float]:
    """The longest time between two Actions of each episode, in seconds."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    async for entry in fleet.bus.scan([fleet.subjects.actions()]):
        times[entry.subject.rpartition(".")[2]].append(entry.time_ns / 1e9)
    return {episode: max(later - earlier for earlier, later in itertools.pairwise(at)) for episode, at in times.items()}


def all_completed(results: list[EpisodeFinished]) -> bool:
    return all((result.outcome, result.reward, result.turns) == ("completed", 1.0, TURNS) for result in results)


# kill -9 of an environment worker: its episodes continue (replayable) or restart elsewhere; none lost, none doubled


async def test_kill_of_an_environment_worker_and_its_replayable_episodes_continue_elsewhere() -> None:
    async with fleet_of() as fleet:
        episodes = await begin(fleet)
        killed_at = anyio.current_time()
        fleet.members["environment-0"].kill()
        assert all_completed(await fleet.all_results(6))
        hit = [episode for episode in episodes if len(await fleet.claims(episode)) > 1]
        assert 0 < len(hit) < 6
        for episode in hit:
            first, second = await fleet.claims(episode)
            assert (first.worker, second.worker, second.reason) == ("environment-0", "environment-1", "taken_over")
            assert second.resumed_at_turn > 0, "it began anew"
            assert await claimed_at(fleet, episode, 2) - killed_at <= ENVIRONMENT_RECOVERY_SECONDS
            played = fleet.results[episode][0].actions
            assert [reference.lane for reference in played] == [first.lane] * second.resumed_at_turn + [second.lane] * (
                TURNS - second.resumed_at_turn
            )


async def test_kill_of_an_environment_worker_and_its_other_episodes_restart_elsewhere() -> None:
    async with fleet_of(make=Unrepeatable) as fleet:
        episodes = await begin(fleet)
        killed_at = anyio.current_time()
        fleet.members["environment-0"].kill()
        assert all_completed(await fleet.all_results(6))
        hit = [episode for episode in episodes if len(await fleet.claims(episode)) > 1]
        assert hit
        for episode in hit:
            _, second = await fleet.claims(episode)
            assert (second.resumed_at_turn, second.reason) == (0, "taken_over")
            assert await claimed_at(fleet, episode, 2) - killed_at <= ENVIRONMENT_RECOVERY_SECONDS
            assert {reference.lane for reference in fleet.results[episode][0].actions} == {second.lane}


# kill -9 of an inference worker: its observations are answered by another; episodes don't notice


@pytest.mark.parametrize("after", [0.5, 2.5], ids=["on the shared lane", "on its own lane"])
async def test_kill_of_an_inference_worker_and_another_answers_its_observations(after: float) -> None:
    async with fleet_of() as fleet:
        await begin(fleet, after=after)
        held = set((await fleet.control(fleet.members["inference-0"], "ping")).busy_with)
        killed_at = fleet.bus.now_ns() / 1e9
        fleet.members["inference-0"].kill()
        results = await fleet.all_results(6)
        assert all_completed(results)
        assert {result.attempts for result in results} == {1}, "an episode noticed"
        assert held, "nobody was hit"
        async for entry in fleet.bus.scan([fleet.subjects.actions()]):
            for _, action in decoded(Action, [entry]):
                if f"{action.episode_id}.{action.attempt}.{action.turn}" in held:
                    assert action.worker == "inference-1"
                    assert entry.time_ns / 1e9 - killed_at <= INFERENCE_RECOVERY_SECONDS + TURN_SECONDS


# kill -9 and restart of the server (in memory; the real one in test_failure_table_server.py)


@pytest.mark.parametrize("seconds", [1.0, 20.0, 50.0])
async def test_kill_and_restart_of_the_server_and_workers_go_on(seconds: float) -> None:
    """Longer than any lease, and longer than a call to the server waits: episodes are late, never failed."""
    async with fleet_of() as fleet:
        await begin(fleet)
        fleet.server.kill()
        await anyio.sleep(seconds)
        fleet.server.restart()
        assert all_completed(await fleet.all_results(6))


# network cut, or a process stopped and resumed: fencing: the late one is ignored and stops


async def test_a_worker_that_was_cut_off_is_superseded_and_its_late_work_ignored() -> None:
    async with fleet_of() as fleet:
        episodes = await begin(fleet)
        late = fleet.members["environment-0"]
        hit = [episode for episode in episodes if (await fleet.claims(episode))[0].worker == late.name]
        late.cut()
        await anyio.sleep(TASK_LEASE_SECONDS + 3)
        late.mend()
        assert all_completed(await fleet.all_results(6))
        assert hit
        assert {fleet.results[episode][0].worker for episode in hit} == {"environment-1"}
        await fleet.until(lambda: fleet.beats[late.name].counters.get("superseded", 0) >= len(hit))
        assert not late.ended.is_set(), "nobody took its lane: it works on"


async def test_a_worker_whose_lane_was_taken_while_it_was_away_stops_for_good() -> None:
    async with fleet_of() as fleet:
        await begin(fleet)
        late = fleet.members["environment-0"]
        late.cut()
        await anyio.sleep(TASK_LEASE_SECONDS + 3)
        await fleet.heard(fleet.environment("environment-2"))
        late.mend()
        await late.ended.wait()
        assert isinstance(late.failure(), LaneLost)
        assert all_completed(await fleet.all_results(6))


async def test_an_inference_worker_that_was_cut_off_answers_too_late() -> None:
    async with fleet_of() as fleet:
        await begin(fleet)
        late = fleet.members["inference-0"]
        late.cut()
        await anyio.sleep(5)
        late.mend()
        results = await fleet.all_results(6)
        assert all_completed(results)
        assert {result.attempts for result in results} == {1}


# worker added or removed while running: work spreads at once; SIGTERM drains: finish or hand back, then exit 0


async def test_a_worker_that_is_added_gets_work_at_once() -> None:
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            first = fleet.environment("environment-0", slots=2)
            await fleet.heard(first, fleet.inference("inference-0", sampler=slow_sampler()))
            await begin(fleet, 10, after=1.5)
            assert fleet.beats[first.name].slots == 2
            added_at = anyio.current_time()
            fleet.environment("environment-1", slots=8)
            await anyio.sleep(0.5)
            claims = [claim for index in range(10) for claim in await fleet.claims(f"e{index}")]
            assert Counter(claim.worker for claim in claims) == {"environment-0": 2, "environment-1": 8}
            assert all_completed(await fleet.all_results(10))
            assert anyio.current_time() - added_at < 2 * TURNS * TURN_SECONDS
            await fleet.rests()


@pytest.mark.parametrize("role", ["environment", "inference"])
async def test_a_worker_that_is_removed_finishes_or_hands_back_and_ends_well(role: str) -> None:
    async with fleet_of() as fleet:
        await begin(fleet)
        leaving = fleet.members[f"{role}-0"]
        leaving.drain.set()
        await leaving.ended.wait()
        assert leaving.error is None
        said = [entry async for entry in fleet.bus.scan([fleet.subjects.life(role, leaving.name)])]
        assert [len(decoded(kind, said, beside=LIFE)) for kind in (WorkerDraining, WorkerStopped)] == [1, 1]
        assert all_completed(await fleet.all_results(6))
        assert all([len(await fleet.claims(f"e{index}")) == 1 for index in range(6)])
        assert max((await longest_pauses(fleet)).values()) <= 2 * TURN_SECONDS + 0.1, "somebody waited for a limit"


async def test_a_worker_that_says_why_it_failed_names_the_cause() -> None:
    with anyio.fail_after(100):
        async with small_fleet() as fleet:
            failing = fleet.inference("inference-0", sampler=BreakingSampler("a"))
            fleet.environment("environment-0")
            await fleet.request(task=Task(key="task", prompt="a"))
            await failing.ended.wait()
            assert isinstance(failing.failure(), ZeroDivisionError)
            said = [entry async for entry in fleet.bus.scan([fleet.subjects.life("inference", failing.name)])]
            (failed,) = [message for _, message in decoded(WorkerFailed, said, beside=LIFE)]
            assert (failed.error_class, failed.error) == ("ZeroDivisionError", "the engine is gone")
            fleet.inference("inference-1")
            assert (await fleet.result()).outcome == "completed"


# an episode that kills whoever runs it; an observation that kills the engine: after 3 tries a recorded outcome; the fleet lives


class Deadly(ScriptedEnvironment):
    """A task with ``deadly`` in its key kills its worker in the second turn."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self._kill = kill

    async def open(self, task: Task) -> None:
        self._is_deadly = "deadly" in task.key
        await super().open(task)

    async def step(self, action: Action) -> Step:
        if self._is_deadly and action.turn == 1:
            self._kill()
            await anyio.sleep_forever()
        return await super().step(action)


def deadly_worker(fleet: SmallFleet, name: str) -> Member:
    """A worker that its episodes may kill."""

    def make() -> ScriptedEnvironment:
        return Deadly(lambda: fleet.members[name].kill())

    return fleet.environment(name, make=make)


async def test_an_episode_that_kills_whoever_runs_it_is_recorded_as_lost_after_three_tries() -> None:
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            fleet.inference("inference-0")
            workers = [deadly_worker(fleet, f"environment-{index}") for index in range(3)]
            await fleet.heard(*workers)
            await fleet.request("deadly", task=Task(key="deadly"))
            for deaths in (1, 2, 3):
                await fleet.until(partial(at_least_ended, workers, deaths))
                workers.append(deadly_worker(fleet, f"environment-{len(workers)}"))
            result = await fleet.result("deadly")
            assert (result.outcome, result.error_class, result.attempts, result.reward) == ("lost", "poison", 3, None)
            await fleet.request("sound")
            assert (await fleet.result("sound")).outcome == "completed"
            await fleet.rests()


async def test_what_runs_beside_an_episode_that_kills_its_worker_is_not_taken_for_another() -> None:
    """One worker plays all of them, and loses all of them twice; then those that might be the cause run one by one."""
    names = [f"neighbour-{index}" for index in range(7)]
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            fleet.inference("inference-0", sampler=slow_sampler())
            workers = [deadly_worker(fleet, "environment-0")]
            await fleet.heard(*workers)
            for name in [*names, "deadly"]:
                await fleet.request(name, task=Task(key=name, prompt="play", config={"turns": 4}))
            for deaths in (1, 2, 3):
                await fleet.until(partial(at_least_ended, workers, deaths))
                workers.append(deadly_worker(fleet, f"environment-{deaths}"))
            results = {name: await fleet.result(name) for name in [*names, "deadly"]}
            assert (results["deadly"].outcome, results["deadly"].error_class) == ("lost", "poison")
            assert {results[name].outcome for name in names} == {"completed"}
            assert min(results[name].attempts for name in names) == 3, "they were lost with it twice"
            await fleet.rests()


def at_least_ended(members: list[Member], count: int) -> bool:
    return sum(member.ended.is_set() for member in members) >= count


class BreakingSampler(ScriptedSampler):
    """An engine that breaks for good on a prompt that begins with ``bad``; ``EngineFailed`` if it is said to be gentle."""

    def __init__(self, bad: str, *, gently: bool = False) -> None:
        super().__init__()
        self._bad = list(bad.encode())
        self._gently = gently
        self.tries = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        if list(request.ids[: len(self._bad)]) == self._bad:
            self.tries += 1
            await anyio.sleep(0.5)
            raise EngineFailed("not this one") if self._gently else ZeroDivisionError("the engine is gone")
        return await super().generate(request)


@pytest.mark.parametrize("gently", [False, True], ids=["the worker dies", "the worker says so"])
async def test_an_observation_that_kills_the_engine_is_recorded_as_lost_after_its_hops(gently: bool) -> None:
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            samplers = [BreakingSampler("bad", gently=gently) for _ in range(8)]
            engines = [fleet.inference(f"inference-{index}", sampler=samplers[index]) for index in range(2)]
            await fleet.heard(*engines)
            await fleet.request("bad", task=Task(key="task", prompt="bad"))
            for deaths in (1, 2, 3, 4) if not gently else ():
                await fleet.until(partial(at_least_ended, engines, deaths))
                engines.append(fleet.inference(f"inference-{len(engines)}", sampler=samplers[len(engines)]))
            result = await fleet.result("bad")
            dead = [engine for engine in engines if engine.ended.is_set()]
            assert [type(engine.failure()) for engine in dead] == [ZeroDivisionError] * (0 if gently else 4)
            assert (result.outcome, result.error_class, result.reward) == ("lost", "poison_observation", None)
            assert sum(sampler.tries for sampler in samplers) == 1 + fleet.configuration.environment.max_hops
            await fleet.request("sound")
            assert (await fleet.result("sound")).outcome == "completed"
            await fleet.rests()


# env hangs, env raises, verifier raises, tool unknown, malformed tool call, NaN reward, 10 MB observation: the outcome table


class Trouble(ScriptedEnvironment):
    """The trouble that the task's key names, in the second turn."""

    async def open(self, task: Task) -> None:
        self._trouble = task.key
        await super().open(task)

    async def step(self, action: Action) -> Step:
        if action.turn == 1:
            match self._trouble:
                case "hangs":
                    await anyio.sleep_forever()
                case "raises":
                    raise EnvironmentFailed("no more")
                case "not a number":
                    return Step(reward=math.nan)
                case "ten megabytes":
                    return Step(messages=(ChatMessage(role="user", content="x" * 10_000_000),))
        return await super().step(action)

    async def verify(self) -> Verdict:
        if self._trouble == "verifier raises":
            raise ZeroDivisionError
        return await super().verify()

    async def close(self) -> None:
        if self._trouble == "close raises":
            raise OSError("already gone")


OUTCOMES = {
    "hangs": "timeout",
    "raises": "env_failed",
    "verifier raises": "verifier_unknown",
    "not a number": "verifier_unknown",
    "ten megabytes": "truncated",
    "close raises": "completed",
    "nothing": "completed",
}


async def test_whatever_an_environment_does_there_is_an_outcome_and_the_fleet_goes_on() -> None:
    """Tools unknown and calls malformed are in test_sessions_under_stress_tools.py."""
    async with fleet_of(make=Trouble, environments=1) as fleet:
        for index, trouble in enumerate([*OUTCOMES] * 3):
            await fleet.request(f"e{index}", task=Task(key=trouble, prompt="play"))
        results = await fleet.all_results(21)
        assert Counter((result.task_key, result.outcome) for result in results) == dict.fromkeys(OUTCOMES.items(), 3)
        assert all((result.reward is None) == (result.outcome not in ("completed", "truncated")) for result in results)


# model emits garbage, engine dies, weights corrupt or of the wrong shape: version unchanged until good (see also *_engine.py)


class Choosy(ScriptedSampler):
    """Refuses versions whose file is called bad."""

    async def load(self, policy: PolicyPublished) -> None:
        if "bad" in policy.uri:
            raise WeightsRejected(f"{policy.uri}: differs from the manifest's sha256")
        await super().load(policy)


async def test_a_bad_version_changes_nothing_until_a_good_one_comes() -> None:
    with anyio.fail_after(100):
        async with small_fleet() as fleet:
            engine = fleet.inference("inference-0", sampler=Choosy())
            fleet.environment("environment-0")
            await fleet.heard(engine)
            await fleet.publish_policy(1, uri="bad")
            await fleet.request("before")
            assert (await fleet.result("before")).policy_versions == (0,)
            await fleet.until(lambda: fleet.beats[engine.name].counters.get("weights_rejected") == 1)
            assert fleet.beats[engine.name].policy_version == 0
            await fleet.publish_policy(2, uri="good")
            await fleet.until(lambda: fleet.beats[engine.name].policy_version == 2)
            await fleet.request("after")
            assert (await fleet.result("after")).policy_versions == (2,)


async def test_a_worker_whose_first_version_is_bad_takes_no_work_until_a_good_one_comes() -> None:
    with anyio.fail_after(100):
        async with small_fleet() as fleet:
            await fleet.publish_policy(1, uri="bad")
            engine = fleet.inference("inference-0", sampler=Choosy())
            fleet.environment("environment-0")
            await fleet.request()
            await anyio.sleep(4)
            assert fleet.beats[engine.name].in_flight == 0
            assert not fleet.results["e"]
            await fleet.publish_policy(2, uri="good")
            assert (await fleet.result()).policy_versions == (2,)
