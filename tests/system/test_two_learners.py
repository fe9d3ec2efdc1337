"""Two policies in one run, each trained by a learner of its own from the same episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from fleetbus.bus.base import StreamEntry
from fleetbus.config.seats import configure_learner, list_trained_seats
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.delivery.cancel import pause_admission
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import decode_entries
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import (
    Action,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    StepTrained,
    Task,
    TrainingFinished,
    decode,
    encode,
)
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.digest_audit import audit_digests
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.observe.run.state import RunState
from tests.support.balanced_log import expect_balance
from tests.support.deployment_member import Member
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

PROPOSER, SOLVER = "default", "solver"
STEPS = 6
OF_ONE_POLICY = (EpisodeSeat(name="proposer", turns=(0, 1, 2), reward=1.0),)
TASKS = [Task(key=f"task-{number}") for number in range(4)]


class Lesson(ScriptedEnvironment):
    """A task is proposed, solved, and proposed again; each seat's reward is its own."""

    replayable = False
    _played = 0

    async def reset(self) -> Start:
        return Start(messages=(ChatMessage(role="user", content="propose"),), seat="proposer")

    async def step(self, action: Action) -> Step:
        self._played += 1
        self._last = action.sampled
        if self._played == 3:
            return Step(terminated=True)
        seat = "solver" if self._played == 1 else "proposer"
        return Step(messages=(ChatMessage(role="user", content=f"turn {self._played}"),), seat=seat)

    async def verify(self) -> Verdict:
        reward = (self._last[0] % 7) / 7
        return Verdict(reward=reward, seats={"proposer": reward, "solver": 1.0 - reward})


class Noting(ScriptedTrainer):
    """Knows how many tokens it was given of each episode."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, int] = {}
        self.times: dict[str, int] = {}

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        for sequence in batch:
            self.tokens[sequence.episode_id] = int(sequence.loss_mask.sum())
            self.times[sequence.episode_id] = self.times.get(sequence.episode_id, 0) + 1
        return super().train(batch, version=version, progress=progress)


def configure(folder: Path, **learner: object) -> tuple[Configuration, Configuration]:
    settings = LearnerSettings(steps=STEPS, groups=2, group_size=2, checkpoint_every=2, **learner)  # type: ignore[arg-type]
    run = RunSettings(name=RUN, folder=str(folder), seats="solver=train")
    configuration = build_configuration(run=run, learner=settings, evaluation=EvaluationSettings(episodes=0))
    (seat,) = list_trained_seats(run)
    return configuration, configure_learner(configuration, seat)


def start_workers(fleet: SmallDeployment) -> None:
    fleet.environment("environment", make=Lesson)
    fleet.inference("inference")
    fleet.inference("inference-solver", policy=SOLVER)


def start_learner(fleet: SmallDeployment, name: str, configuration: Configuration, trainer: ScriptedTrainer) -> Member:
    return fleet.learner(name, trainer=trainer, curriculum=Curriculum(TASKS, (), seed=1), configuration=configuration)


async def read_steps(fleet: SmallDeployment, policy: str) -> list[StepTrained]:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.train(policy)]) if b"StepTrained" in entry.payload]
    return [message for _, message in decode_entries(StepTrained, entries)]


async def test_each_learner_trains_the_turns_of_its_policy_in_the_same_episodes(tmp_path: Path) -> None:
    own, other = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        trainers = Noting(), Noting()
        members = [
            start_learner(fleet, "learner", own, trainers[0]),
            start_learner(fleet, "learner-solver", other, trainers[1]),
        ]
        for member in members:
            await member.ended.wait()
        for policy in (PROPOSER, SOLVER):
            assert [step.step for step in await read_steps(fleet, policy)] == [*range(1, STEPS + 1)], policy
        assert trainers[0].tokens.keys() == trainers[1].tokens.keys(), "the same episodes"
        assert set(trainers[0].times.values()) == set(trainers[1].times.values()) == {1}, "each once"
        counts = {(trainers[0].tokens[each], trainers[1].tokens[each]) for each in trainers[0].tokens}
        assert counts == {(16, 8)}, "two turns of one seat, one of the other"
        assert await expect_balance(fleet) == 2 * len(trainers[0].tokens), "each for both policies"
        state = RunState(STEPS)
        async for entry in fleet.bus.scan([fleet.subjects.log]):
            if (message := read_stored(entry)) is not None:
                state.apply(entry, message, 0.0, entry.time_ns)
        assert [point.step for point in state.progress.training.steps] == [*range(1, STEPS + 1)], "of the run's own policy"
        result = fleet.results[next(iter(trainers[0].tokens))][0]
        assert [(seat.name, seat.policy) for seat in result.seats] == [("proposer", ""), ("solver", SOLVER)]
        assert all(seat.reward is not None for seat in result.seats)


@pytest.mark.parametrize("killed", ["learner", "learner-solver"])
async def test_a_learner_that_is_killed_goes_on_with_its_own_policy(tmp_path: Path, killed: str) -> None:
    configurations = dict(zip(("learner", "learner-solver"), configure(tmp_path), strict=True))
    async with small_deployment(configurations["learner"], published=False) as fleet:
        start_workers(fleet)
        members = {name: start_learner(fleet, name, each, Noting()) for name, each in configurations.items()}
        policy = PROPOSER if killed == "learner" else SOLVER
        async with fleet.bus.read([fleet.subjects.train(policy)]) as reader:
            steps = 0
            while steps < 3:
                steps += b"StepTrained" in (await reader.receive()).payload
        members[killed].kill()
        await members[killed].ended.wait()
        await anyio.sleep(60)
        trainer = Noting()
        members[killed] = start_learner(fleet, f"{killed}-1", configurations[killed], trainer)
        for member in members.values():
            await member.ended.wait()
        for each in (PROPOSER, SOLVER):
            counted = {step.step: step for step in await read_steps(fleet, each)}
            assert sorted(counted) == [*range(1, STEPS + 1)], each
            trained = [episode for step in counted.values() for episode in step.episodes]
            assert len(trained) == len(set(trained)), each
        await expect_balance(fleet)


async def test_a_learner_that_is_away_is_waited_for(tmp_path: Path) -> None:
    own, _ = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet, "learner", own, Noting())
        await anyio.sleep(120)
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.tasks()])]
        groups = {request.group_id for _, request in decode_entries(EpisodeRequested, entries)}
        most = own.learner.groups * (1 + own.learner.max_staleness)
        assert len(groups) <= most, "nothing is asked for that the other learner would find stale"
        assert not learner.ended.is_set()


async def test_the_learner_that_asks_does_not_wait_for_one_that_has_finished(tmp_path: Path) -> None:
    own, other = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        short = replace(other, learner=replace(other.learner, steps=2))
        members = [start_learner(fleet, "learner", own, Noting()), start_learner(fleet, "learner-solver", short, Noting())]
        for member in members:
            await member.ended.wait()
        assert len(await read_steps(fleet, PROPOSER)) == STEPS
        assert len(await read_steps(fleet, SOLVER)) == 2
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.train(SOLVER)])]
        assert decode_entries(TrainingFinished, entries[-1:])


async def test_a_learner_that_asks_anew_does_not_wait_for_one_that_had_finished_long_before(tmp_path: Path) -> None:
    own, other = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        short = replace(other, learner=replace(other.learner, steps=1))
        joined = start_learner(fleet, "learner-solver", short, Noting())
        learner = start_learner(fleet, "learner", own, Noting())
        await joined.ended.wait()
        async with fleet.bus.read([fleet.subjects.train(PROPOSER)]) as reader:
            while b"CheckpointStored" not in (payload := (await reader.receive()).payload) or b"\x04" not in payload:
                pass
        learner.kill()
        await learner.ended.wait()
        again = start_learner(fleet, "learner-1", own, Noting())
        with anyio.fail_after(3600):
            await again.ended.wait()
        assert {step.step for step in await read_steps(fleet, PROPOSER)} == {*range(1, STEPS + 1)}


async def test_a_pause_is_answered_by_the_learner_that_asks_and_by_no_other(tmp_path: Path) -> None:
    own, other = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        joined = start_learner(fleet, "learner-solver", other, Noting())
        await fleet.heard(joined)
        with pytest.raises(RequestUnanswered):  # nothing was paused, and nobody says so
            await pause_admission(fleet.bus, fleet.subjects, is_paused=True)
        assert not (await fleet.control(joined, "pause")).done
        learner = start_learner(fleet, "learner", own, Noting())
        await fleet.heard(learner)
        for is_paused in (True, False, True):
            assert await pause_admission(fleet.bus, fleet.subjects, is_paused=is_paused) == "learner"
        for member in (learner, joined):
            assert (await fleet.control(member, "drain")).done
            await member.ended.wait()


async def test_the_deep_audit_proves_no_turns_of_another_policy(tmp_path: Path) -> None:
    own, other = configure(tmp_path)
    async with small_deployment(own, published=False) as fleet:
        start_workers(fleet)
        members = [start_learner(fleet, "learner", own, Noting()), start_learner(fleet, "learner-solver", other, Noting())]
        for member in members:
            await member.ended.wait()
        log = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
        forged = [
            replace(entry, payload=encode(replace(decode(EpisodeFinished, entry.payload, subject=""), seats=OF_ONE_POLICY)))
            if b"EpisodeFinished" in entry.payload
            else entry
            for entry in log
        ]

        async def scan() -> AsyncIterator[StreamEntry]:
            for entry in forged:
                yield entry

        proof = await audit_digests(scan, last_sequence=log[-1].sequence)
        (wrong,) = (finding for finding in proof.findings if finding.kind == "digest_wrong")
        assert wrong.count >= len(await read_steps(fleet, SOLVER)), "the other policy had no part in any"


async def test_a_time_out_in_an_episode_of_two_trained_policies_is_nobodys_reward(tmp_path: Path) -> None:
    own, _ = configure(tmp_path)
    async with small_deployment(own) as fleet:
        await fleet.heard(fleet.environment("environment", make=Lesson), fleet.inference("inference"))
        await fleet.request("e", timeout_reward=-1.0)
        result = await fleet.result("e")
        assert (result.outcome, result.reward, result.turns) == ("timeout", None, 1), "nobody serves the solver"
