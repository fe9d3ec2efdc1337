"""Workers or their server are killed, cut off, added or removed: a test or more per row of the table of
failures, on virtual time, with the time to recover measured.

Episodes and weights that are bad themselves are in `test_failure_table_outcomes.py`, the learner's rows in
`test_failure_table_learner.py`, those of a real server and a real engine in `test_failure_table_server.py` and
`..._engine.py`; the full log is the recorder's.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import anyio
import pytest

from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, TASK_LEASE_SECONDS
from fleetbus.delivery.lanes import LaneLost
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    EpisodeFinished,
    Task,
    WorkerDraining,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from tests.support.interrupted_deployment import (
    PATIENT,
    TURN_SECONDS,
    TURNS,
    BreakingSampler,
    begin,
    is_all_completed,
    make_slow_sampler,
    start_deployment,
)
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

ENVIRONMENT_RECOVERY_SECONDS = TASK_LEASE_SECONDS + 2.0
INFERENCE_RECOVERY_SECONDS = OBSERVATION_LEASE_SECONDS + 2.0
LIFE = (WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed)

anyio_backend = virtual_time


class Unrepeatable(ScriptedEnvironment):
    """What it shows depends on more than the actions: it has to begin anew."""

    replayable = False


async def claimed_at(fleet: SmallDeployment, episode: str, attempt: int) -> float:
    """When that attempt claimed, on anyio's clock."""
    entries = await fleet.bus.history([fleet.subjects.episode(episode)])
    offset = fleet.bus.now_ns() / 1e9 - anyio.current_time()
    claims = decode_entries(AttemptStarted, entries, beside=(EpisodeFinished,))
    return next(entry.time_ns / 1e9 - offset for entry, claim in claims if claim.attempt == attempt)


async def longest_pauses(fleet: SmallDeployment) -> dict[str, float]:
    """The longest time between two Actions of each episode, in seconds."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    async for entry in fleet.bus.scan([fleet.subjects.actions()]):
        times[entry.subject.rpartition(".")[2]].append(entry.time_ns / 1e9)
    return {episode: max(later - earlier for earlier, later in itertools.pairwise(at)) for episode, at in times.items()}


# kill -9 of an environment worker: its episodes continue (replayable) or restart elsewhere; none lost, none doubled


async def test_kill_of_an_environment_worker_and_its_replayable_episodes_continue_elsewhere() -> None:
    async with start_deployment() as fleet:
        episodes = await begin(fleet)
        killed_at = anyio.current_time()
        fleet.members["environment-0"].kill()
        assert is_all_completed(await fleet.all_results(6))
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
    async with start_deployment(make=Unrepeatable) as fleet:
        episodes = await begin(fleet)
        killed_at = anyio.current_time()
        fleet.members["environment-0"].kill()
        assert is_all_completed(await fleet.all_results(6))
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
    async with start_deployment() as fleet:
        await begin(fleet, after=after)
        held = set((await fleet.control(fleet.members["inference-0"], "ping")).busy_with)
        killed_at = fleet.bus.now_ns() / 1e9
        fleet.members["inference-0"].kill()
        results = await fleet.all_results(6)
        assert is_all_completed(results)
        assert {result.attempts for result in results} == {1}, "an episode noticed"
        assert held, "nobody was hit"
        async for entry in fleet.bus.scan([fleet.subjects.actions()]):
            for _, action in decode_entries(Action, [entry]):
                if f"{action.episode_id}.{action.attempt}.{action.turn}" in held:
                    assert action.worker == "inference-1"
                    assert entry.time_ns / 1e9 - killed_at <= INFERENCE_RECOVERY_SECONDS + TURN_SECONDS


# kill -9 and restart of the server (in memory; the real one in test_failure_table_server.py)


@pytest.mark.parametrize("seconds", [1.0, 20.0, 50.0])
async def test_kill_and_restart_of_the_server_and_workers_go_on(seconds: float) -> None:
    """Longer than any lease, and longer than a call to the server waits: episodes are late, never failed."""
    async with start_deployment() as fleet:
        await begin(fleet)
        fleet.server.kill()
        await anyio.sleep(seconds)
        fleet.server.restart()
        assert is_all_completed(await fleet.all_results(6))


# network cut, or a process stopped and resumed: fencing: the late one is ignored and stops


async def test_a_worker_that_was_cut_off_is_superseded_and_its_late_work_ignored() -> None:
    async with start_deployment() as fleet:
        episodes = await begin(fleet)
        late = fleet.members["environment-0"]
        hit = [episode for episode in episodes if (await fleet.claims(episode))[0].worker == late.name]
        late.cut()
        await anyio.sleep(TASK_LEASE_SECONDS + 3)
        late.mend()
        assert is_all_completed(await fleet.all_results(6))
        assert hit
        assert {fleet.results[episode][0].worker for episode in hit} == {"environment-1"}
        await fleet.until(lambda: fleet.beats[late.name].counters.get("superseded", 0) >= len(hit))
        assert not late.ended.is_set(), "nobody took its lane: it works on"


async def test_a_worker_whose_lane_was_taken_while_it_was_away_stops_for_good() -> None:
    async with start_deployment() as fleet:
        await begin(fleet)
        late = fleet.members["environment-0"]
        late.cut()
        await anyio.sleep(TASK_LEASE_SECONDS + 3)
        await fleet.heard(*(fleet.environment(f"environment-{number}") for number in (2, 3, 4)))  # for whom two lanes are free
        late.mend()
        await late.ended.wait()
        assert isinstance(late.failure(), LaneLost)
        assert is_all_completed(await fleet.all_results(6))


async def test_an_inference_worker_that_was_cut_off_answers_too_late() -> None:
    async with start_deployment() as fleet:
        await begin(fleet)
        late = fleet.members["inference-0"]
        late.cut()
        await anyio.sleep(5)
        late.mend()
        results = await fleet.all_results(6)
        assert is_all_completed(results)
        assert {result.attempts for result in results} == {1}


# worker added or removed while running: work spreads at once; SIGTERM drains: finish or hand back, then exit 0


async def test_a_worker_that_is_added_gets_work_at_once() -> None:
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            first = fleet.environment("environment-0", slots=2)
            await fleet.heard(first, fleet.inference("inference-0", sampler=make_slow_sampler()))
            await begin(fleet, 10, after=1.5)
            assert fleet.beats[first.name].slots == 2
            added_at = anyio.current_time()
            fleet.environment("environment-1", slots=8)
            await anyio.sleep(0.5)
            claims = [claim for index in range(10) for claim in await fleet.claims(f"e{index}")]
            assert Counter(claim.worker for claim in claims) == {"environment-0": 2, "environment-1": 8}
            assert is_all_completed(await fleet.all_results(10))
            assert anyio.current_time() - added_at < 2 * TURNS * TURN_SECONDS
            await fleet.check_at_rest()


@pytest.mark.parametrize("role", ["environment", "inference"])
async def test_a_worker_that_is_removed_finishes_or_hands_back_and_ends_well(role: str) -> None:
    async with start_deployment() as fleet:
        await begin(fleet)
        leaving = fleet.members[f"{role}-0"]
        leaving.drain.set()
        await leaving.ended.wait()
        assert leaving.error is None
        said = [entry async for entry in fleet.bus.scan([fleet.subjects.life(role, leaving.name)])]
        assert [len(decode_entries(kind, said, beside=LIFE)) for kind in (WorkerDraining, WorkerStopped)] == [1, 1]
        assert is_all_completed(await fleet.all_results(6))
        assert all([len(await fleet.claims(f"e{index}")) == 1 for index in range(6)])
        assert max((await longest_pauses(fleet)).values()) <= 2 * TURN_SECONDS + 0.1, "somebody waited for a limit"


async def test_a_worker_that_says_why_it_failed_names_the_cause() -> None:
    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            failing = fleet.inference("inference-0", sampler=BreakingSampler("a"))
            fleet.environment("environment-0")
            await fleet.request(task=Task(key="task", prompt="a"))
            await failing.ended.wait()
            assert isinstance(failing.failure(), ZeroDivisionError)
            said = [entry async for entry in fleet.bus.scan([fleet.subjects.life("inference", failing.name)])]
            (failed,) = [message for _, message in decode_entries(WorkerFailed, said, beside=LIFE)]
            assert (failed.error_class, failed.error) == ("ZeroDivisionError", "the engine is gone")
            fleet.inference("inference-1")
            assert (await fleet.result()).outcome == "completed"
