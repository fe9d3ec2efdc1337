"""Routing of observations and episodes: sticky lanes, re-routing, backpressure, and two who answer the same turn.

All on virtual time; the moments at which observations are sent again are measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from fleetbus.bus.memory_faults import NO_DELIVERY_FAULT, DeliveryFault, Faults
from fleetbus.bus.streams import actions_consumer, observations_consumer
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, Observation, Task
from fleetbus_schemas.tokens import pack_ids, pack_logprobs
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

LATE = LimitSettings().late
PATIENT = LimitSettings(action=60, drain=10)

anyio_backend = virtual_time


class LosesDeliveries(Faults):
    """What these consumers deliver never arrives."""

    def __init__(self) -> None:
        self.consumers: set[str] = set()

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        return DeliveryFault(lost=True) if consumer in self.consumers else NO_DELIVERY_FAULT


class Counted(ScriptedSampler):
    """Knows how many turns it was asked for, and how many of them at once."""

    def __init__(self, *, seconds: float = 1.0) -> None:
        super().__init__(delay=lambda _: seconds)
        self.now = self.most = self.answered = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            generation = await super().generate(request)
            self.answered += 1
            return generation
        finally:
            self.now -= 1


@asynccontextmanager
async def fleet_of(
    engines: int = 2, *, seconds: float = 1.0, faults: Faults | None = None, max_hops: int = 3
) -> AsyncIterator[SmallDeployment]:
    """One environment worker and some engines that take so many seconds per turn."""
    configuration = build_configuration(limits=PATIENT, environment=EnvironmentSettings(slots=8, max_hops=max_hops))
    with anyio.fail_after(2000):
        async with small_deployment(configuration, faults=faults) as fleet:
            await fleet.heard(fleet.environment("environment-0"))
            for index in range(engines):  # one after another, so that inference-N has lane iN
                sampler = ScriptedSampler(delay=lambda _: seconds)
                await fleet.heard(fleet.inference(f"inference-{index}", sampler=sampler))
            yield fleet


async def sent(fleet: SmallDeployment) -> list[tuple[float, str, Observation]]:
    """Every observation with when it was sent, on anyio's clock, and its lane."""
    offset = fleet.bus.now_ns() / 1e9 - anyio.current_time()
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.observations()])]
    return [
        (entry.time_ns / 1e9 - offset, entry.subject.split(".")[4], observation)
        for entry, observation in decode_entries(Observation, entries)
    ]


async def resent(fleet: SmallDeployment) -> list[tuple[float, Observation]]:
    return [(at, observation) for at, _, observation in await sent(fleet) if observation.hop]


def task_of(turns: int) -> Task:
    return Task(key="task", prompt="play", config={"turns": turns})


async def lane_of(fleet: SmallDeployment, episode: str = "e") -> str:
    """The engine that the episode sticks to by now."""
    return [action.worker for action in await fleet.actions() if action.episode_id == episode][-1]


def stray(episode: str = "e", *, attempt: int, turn: int = 0) -> Action:
    """An Action of another attempt, as it may arrive late."""
    return Action(
        episode_id=episode,
        attempt=attempt,
        turn=turn,
        text="too late",
        prompt_delta=pack_ids([5]),
        sampled=pack_ids([6]),
        logprobs=pack_logprobs([-1.0]),
        history_hash=b"of another attempt",
    )


# Sticky


async def test_after_its_first_action_an_episode_stays_with_its_engine() -> None:
    async with fleet_of(3) as fleet:
        for index in range(9):
            await fleet.request(f"e{index}", task=task_of(4))
        await fleet.all_results(9)
        engines: defaultdict[str, set[str]] = defaultdict(set)
        for action in await fleet.actions():
            engines[action.episode_id].add(action.worker)
        assert all(len(workers) == 1 for workers in engines.values())
        assert {worker for workers in engines.values() for worker in workers} == {f"inference-{index}" for index in range(3)}
        lanes = [(observation.turn, lane) for _, lane, observation in await sent(fleet)]
        assert all((lane == "any") == (turn == 0) for turn, lane in lanes)


# Sent again


async def test_observations_of_a_draining_engine_are_sent_elsewhere_at_once() -> None:
    async with fleet_of(seconds=5.0) as fleet:
        await fleet.request(task=task_of(3))
        await anyio.sleep(7)
        leaving = fleet.members[await lane_of(fleet)]
        drained_at = anyio.current_time()
        leaving.drain.set()
        result = await fleet.result()
        ((at, observation),) = await resent(fleet)
        assert (observation.turn, observation.hop) == (1, 1)
        assert at - drained_at < 0.1
        assert (result.outcome, result.attempts) == ("completed", 1)
        later = [action.worker for action in await fleet.actions() if action.turn == 2]
        assert later != [leaving.name] or leaving.ended.is_set()


async def test_observations_of_a_dead_engine_are_sent_elsewhere_when_they_are_late() -> None:
    async with fleet_of(seconds=5.0) as fleet:
        await fleet.request(task=task_of(3))
        await anyio.sleep(5.5)
        fleet.members[await lane_of(fleet)].kill()
        await fleet.result()
        ((at, observation),) = await resent(fleet)
        first = next(at for at, _, each in await sent(fleet) if each.turn == observation.turn)
        assert LATE <= at - first <= LATE * 1.5 + 0.1


async def test_observations_that_a_living_engine_never_took_are_sent_elsewhere() -> None:
    """It answers questions, so it is not dead; it does not hold the turn, and at the second look neither."""
    faults = LosesDeliveries()
    async with fleet_of(seconds=0.1, faults=faults) as fleet:
        faults.consumers = {observations_consumer("default", "i0"), observations_consumer("default", "i1")}
        await fleet.request(task=task_of(2))
        result = await fleet.result()
        ((at, observation),) = await resent(fleet)
        first = next(at for at, _, each in await sent(fleet) if each.turn == observation.turn)
        assert 2 * LATE <= at - first <= 4 * LATE
        assert result.outcome == "completed"


async def test_an_engine_that_holds_the_turn_is_waited_for() -> None:
    async with fleet_of(seconds=30.0) as fleet:
        await fleet.request(task=task_of(2))
        assert (await fleet.result()).outcome == "completed"
        assert await resent(fleet) == []


async def test_a_late_action_is_found_in_the_log_before_anything_is_sent_again() -> None:
    faults = LosesDeliveries()
    faults.consumers = {actions_consumer("e0")}
    async with fleet_of(seconds=0.1, faults=faults) as fleet:
        await fleet.request(task=task_of(3))
        result = await fleet.result()
        assert (result.outcome, result.turns) == ("completed", 3)
        assert await resent(fleet) == []
        assert result.timings["action"] <= 3 * (1.5 * LATE + 0.1)


async def test_a_late_action_of_an_older_attempt_on_the_same_lane_wedges_nothing() -> None:
    """It takes the place that the observation names, so the true answer is refused and has to be asked for again."""
    async with fleet_of(seconds=0.5) as fleet:
        await fleet.request(task=task_of(2))
        await anyio.sleep(0.2)
        await fleet.stored(fleet.subjects.action("e0", "e"), stray(attempt=0))
        result = await fleet.result()
        assert (result.outcome, result.turns, result.attempts) == ("completed", 2, 1)
        ((_, observation),) = await resent(fleet)
        assert (observation.turn, observation.hop, observation.action_sequence > 0) == (0, 1, True)
        assert "too late" not in [turn.text for turn in await trained(fleet)]


async def trained(fleet: SmallDeployment, episode: str = "e") -> list[Action]:
    """The Actions that the result names."""
    wanted = {reference.sequence for reference in (await fleet.result(episode)).actions}
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.actions()])]
    return [action for entry, action in decode_entries(Action, entries) if entry.sequence in wanted]


@pytest.mark.parametrize("max_hops", [1, 3])
async def test_an_observation_that_needs_too_many_hops_ends_its_episode(max_hops: int) -> None:
    async with fleet_of(0, max_hops=max_hops) as fleet:
        await fleet.request()
        await anyio.sleep(0.1)
        subject = fleet.subjects.action("e0", "e")
        for hop in range(max_hops + 1):
            await fleet.stored(subject, stray(attempt=0))
            await anyio.sleep(12)  # longer than checks of a late action are apart
            assert len(await resent(fleet)) == min(hop + 1, max_hops)
        result = await fleet.result()
        assert (result.outcome, result.error_class) == ("lost", "poison_observation")
        assert [observation.hop for _, observation in await resent(fleet)] == list(range(1, max_hops + 1))


async def test_a_failed_action_ends_its_episode_as_lost() -> None:
    async with fleet_of(0) as fleet:
        await fleet.request()
        await anyio.sleep(0.1)
        failed = Action(episode_id="e", attempt=1, turn=0, text="", finish_reason="failed", error_class="history_mismatch")
        await fleet.stored(fleet.subjects.action("e0", "e"), failed)
        result = await fleet.result()
        assert (result.outcome, result.error_class, result.turns) == ("lost", "history_mismatch", 0)


# Two who answer the same turn


async def test_of_two_engines_that_answer_the_same_turn_one_action_is_stored() -> None:
    """The environment worker asks again while the first engine still works: both answer, the server stores one."""
    engines = [Counted(seconds=5.0), Counted(seconds=5.0)]
    async with fleet_of(0) as fleet:
        for index, sampler in enumerate(engines):
            await fleet.heard(fleet.inference(f"inference-{index}", sampler=sampler))
        await fleet.request(task=task_of(3))
        await anyio.sleep(6)
        fleet.members[await lane_of(fleet)].drain.set()
        result = await fleet.result()
        await fleet.check_at_rest()
        assert sum(engine.answered for engine in engines) == 4, "nobody answered twice, so nothing was shown"
        assert Counter(action.turn for action in await fleet.actions()) == {0: 1, 1: 1, 2: 1}
        assert (result.outcome, result.turns) == ("completed", 3)


# Backpressure


class House:
    """Environments of one worker: how many are open at once."""

    def __init__(self, *, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.now = self.most = self.finished = 0

    def __call__(self) -> ScriptedEnvironment:
        return Guest(self)


class Guest(ScriptedEnvironment):
    def __init__(self, house: House) -> None:
        super().__init__()
        self._house = house

    async def open(self, task: Task) -> None:
        self._house.now += 1
        self._house.most = max(self._house.most, self._house.now)
        await super().open(task)

    async def step(self, action: Action) -> Step:
        await anyio.sleep(self._house.step_seconds)
        return await super().step(action)

    async def close(self) -> None:
        self._house.now -= 1
        self._house.finished += 1


async def test_nobody_ever_holds_more_than_its_slots_with_ten_times_the_demand() -> None:
    """Heartbeats are checked by the fleet; here what was really held is counted beside them."""
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            houses = [House(), House()]
            engines = [Counted(), Counted()]
            for index in range(2):
                fleet.environment(f"environment-{index}", make=houses[index], slots=4)
                fleet.inference(f"inference-{index}", sampler=engines[index], slots=2)
            for index in range(80):
                await fleet.request(f"e{index}", task=task_of(2), deadline_seconds=1000)
            results = await fleet.all_results(80)
            assert {result.outcome for result in results} == {"completed"}
            assert [house.most for house in houses] == [4, 4]
            assert all(0 < engine.most <= 2 for engine in engines)
            assert max(fleet.most_in_flight[f"environment-{index}"] for index in range(2)) == 4
            assert max(fleet.most_in_flight[f"inference-{index}"] for index in range(2)) <= 2
            await fleet.check_at_rest()


async def test_a_slow_worker_beside_a_fast_one_gets_work_in_proportion() -> None:
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fast, slow = House(step_seconds=1.0), House(step_seconds=4.0)
            members = [
                fleet.environment("environment-0", make=fast, slots=4),
                fleet.environment("environment-1", make=slow, slots=4),
                fleet.inference("inference-0"),
            ]
            await fleet.heard(*members)
            started = anyio.current_time()
            for index in range(100):
                await fleet.request(f"e{index}", task=task_of(1), deadline_seconds=1000)
            await fleet.all_results(100)
            assert fast.finished + slow.finished == 100
            assert 3.5 <= fast.finished / slow.finished <= 4.5
            assert anyio.current_time() - started <= 100 / (4 / 1.0 + 4 / 4.0) + 4.0, "somebody was idle"
