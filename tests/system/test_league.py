"""A learner whose opponents are earlier versions of its own policy: drawn once for a group, recorded, played, never trained."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, ChatMessage, EpisodeRequested, EvaluationFinished, SeatPolicy, StepTrained, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.episode import runner as attempt_runner
from fleetbus_workers.environment.episode.policy_client import PolicyClient
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats
from fleetbus_workers.inference.snapshots import SnapshotSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.balanced_log import expect_balance
from tests.support.deployment_member import Member
from tests.support.small_deployment import LIMITS, RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

STEPS = 6
TASKS = [Task(key=f"task-{number}") for number in range(4)]


class Duel(ScriptedEnvironment):
    """Each seat acts twice; who samples the higher first token wins."""

    _played = 0

    async def reset(self) -> Start:
        self._drawn: list[int] = []
        return Start(messages=(ChatMessage(role="user", content="begin"),), seat="first")

    async def step(self, action: Action) -> Step:
        self._played += 1
        self._drawn.append(action.sampled[0])
        if self._played == 4:
            return Step(terminated=True)
        return Step(
            messages=(ChatMessage(role="user", content=f"turn {self._played}"),), seat=("first", "second")[self._played % 2]
        )

    async def verify(self) -> Verdict:
        won = float((self._drawn[0] > self._drawn[1]) - (self._drawn[0] < self._drawn[1]))
        return Verdict(reward=won, seats={"first": won, "second": -won})


class Counting(ScriptedTrainer):
    """Knows how many tokens it was given to train of each episode."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, int] = {}

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        for sequence in batch:
            self.tokens[sequence.episode_id] = self.tokens.get(sequence.episode_id, 0) + int(sequence.loss_mask.sum())
        return super().train(batch, version=version, progress=progress)


def configure(folder: Path, rule: str = "uniform:3", episodes: int = 0) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(folder), seats=f"second=league:{rule}"),
        learner=LearnerSettings(steps=STEPS, groups=2, group_size=4, checkpoint_every=2),
        evaluation=EvaluationSettings(episodes=episodes, every=2),
    )


def start_workers(fleet: SmallDeployment) -> None:
    fleet.environment("environment", make=Duel)
    fleet.inference("inference")
    fleet.inference("inference-second", policy="second")


def start_learner(fleet: SmallDeployment, name: str = "learner", held_out: Sequence[Task] = ()) -> Member:
    return fleet.learner(name, trainer=Counting(), curriculum=Curriculum(TASKS, held_out, seed=1))


async def read_requests(fleet: SmallDeployment) -> list[EpisodeRequested]:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.tasks()])]
    return [request for _, request in decode_entries(EpisodeRequested, entries)]


async def read_steps(fleet: SmallDeployment) -> list[StepTrained]:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.train("default")]) if b"StepTrained" in entry.payload]
    return [message for _, message in decode_entries(StepTrained, entries)]


def name_opponents(requests: Sequence[EpisodeRequested]) -> dict[str, set[int | None]]:
    """The versions that play the seat, by group."""
    found: defaultdict[str, set[int | None]] = defaultdict(set)
    for request in requests:
        (seat,) = request.seats
        found[request.group_id].add(seat.version)
    return found


async def expect_played_as_requested(fleet: SmallDeployment) -> None:
    requested = {request.episode_id: request.seats[0].version for request in await read_requests(fleet)}
    seats = {(each.episode_id, each.attempt, each.turn): each.seat for each in await fleet.observations()}
    by_opponents = [each for each in await fleet.actions() if seats[each.episode_id, each.attempt, each.turn] == "second"]
    assert by_opponents
    for action in by_opponents:
        assert [span.version for span in action.versions] == [requested[action.episode_id]]


async def test_opponents_are_drawn_by_group_recorded_played_and_not_trained(tmp_path: Path) -> None:
    async with small_deployment(configure(tmp_path), published=False) as fleet:
        start_workers(fleet)
        trainer = Counting()
        learner = fleet.learner("learner", trainer=trainer, curriculum=Curriculum(TASKS, (), seed=1))
        await learner.ended.wait()
        assert learner.error is None
        requests = await read_requests(fleet)
        opponents = name_opponents(requests)
        assert all(len(versions) == 1 for versions in opponents.values()), "all episodes of a group meet the same one"
        for request in requests:
            (seat,) = request.seats
            assert seat.version in range(max(request.policy_version - 2, 0), request.policy_version + 1)
            assert seat.sampling == request.sampling, "it plays as the policy does"
        assert len(set.union(*opponents.values())) > 2
        await expect_played_as_requested(fleet)
        assert set(trainer.tokens.values()) == {16}, "two turns of eight tokens, and none of the opponent's"
        metrics = [step.metrics for step in await read_steps(fleet)]
        assert {"league_rating", "league_rating_error", "league_win_rate"} <= metrics[-1].keys()
        await expect_balance(fleet)


async def test_the_same_seed_draws_the_same_opponents(tmp_path: Path) -> None:
    drawn = []
    for number in range(2):
        async with small_deployment(configure(tmp_path / str(number), "win_rate:3"), published=False) as fleet:
            start_workers(fleet)
            await start_learner(fleet).ended.wait()
            requests = await read_requests(fleet)
            drawn.append({(each.episode_id, each.policy_version): each.seats[0].version for each in requests})
    common = drawn[0].keys() & drawn[1].keys()
    assert len(common) > 20
    assert all(drawn[0][each] == drawn[1][each] for each in common)


@pytest.mark.parametrize("rule", ["uniform:3", "win_rate:3"])
async def test_a_learner_that_takes_over_leaves_groups_their_opponents(tmp_path: Path, rule: str) -> None:
    async with small_deployment(configure(tmp_path, rule), published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet)
        async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
            steps = 0
            while steps < 3:
                steps += b"StepTrained" in (await reader.receive()).payload
        learner.kill()
        await learner.ended.wait()
        again = start_learner(fleet, "learner-1")
        await again.ended.wait()
        assert again.error is None
        assert all(len(versions) == 1 for versions in name_opponents(await read_requests(fleet)).values())
        await expect_played_as_requested(fleet)
        await expect_balance(fleet)


async def test_a_group_that_was_asked_for_in_part_is_filled_up_against_the_same_opponent(tmp_path: Path) -> None:
    async with small_deployment(configure(tmp_path, "newest"), published=False) as fleet:
        await fleet.publish_policy(0)
        await fleet.publish_policy(1)
        for number in (1, 3):
            await fleet.request(f"g000000-{number}")
        requests = await read_requests(fleet)
        assert [request.seats[0].version for request in requests] == [None, None]
        for number in (0, 2):
            seats = (SeatPolicy(seat="second", policy="second", version=0),)
            request = replace(requests[0], episode_id=f"g000009-{number}", group_id="g000009", sample_index=number, seats=seats)
            await fleet.stored(fleet.subjects.task("default", request.episode_id), replace(request, lineage="l0", group_size=4))
        start_learner(fleet)
        await anyio.sleep(30)
        filled = [each for each in await read_requests(fleet) if each.group_id == "g000009"]
        assert sorted(each.episode_id for each in filled) == [f"g000009-{number}" for number in range(4)]
        assert [each.seats[0].version for each in filled] == [0] * 4, "the newest is another"


async def test_an_episode_goes_on_against_its_opponent_when_any_worker_is_killed(tmp_path: Path) -> None:
    async with small_deployment(configure(tmp_path), published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet)
        for number, role in enumerate(("environment", "inference-second", "inference")):
            async with fleet.bus.read([fleet.subjects.actions()], start=(await fleet.bus.log_state()).last_sequence) as reader:
                for _ in range(5):
                    await reader.receive()
            fleet.members[role].kill()
            if role == "environment":
                fleet.environment(f"environment-{number}", make=Duel)
            else:
                fleet.inference(f"{role}-{number}", policy="second" if "second" in role else "")
        await learner.ended.wait()
        assert learner.error is None
        await expect_played_as_requested(fleet)
        await expect_balance(fleet)


async def test_an_opponent_that_is_gone_ends_its_episode_with_that_reason(tmp_path: Path) -> None:
    patient = replace(configure(tmp_path), limits=replace(LIMITS, action=300, episode=600))
    async with small_deployment(patient) as fleet:
        await fleet.heard(
            fleet.environment("environment", make=Duel),
            fleet.inference("inference"),
            fleet.inference("inference-second", policy="second"),
        )
        seats = (SeatPolicy(seat="second", policy="second", version=7),)
        await fleet.request("other")
        (request,) = await read_requests(fleet)
        await fleet.stored(fleet.subjects.task("default", "e"), replace(request, episode_id="e", seats=seats))
        result = await fleet.result("e")
        assert (result.outcome, result.error_class, result.reward) == ("lost", "version_gone", None)
        assert "the log has no version 7" in result.error and "seat second" in result.error
        assert (await fleet.result("other")).error_class == "version_gone", "a request that names none is refused as well"


async def test_held_out_tasks_are_played_against_the_first_version(tmp_path: Path) -> None:
    async with small_deployment(configure(tmp_path, episodes=3), published=False) as fleet:
        start_workers(fleet)
        await start_learner(fleet, held_out=[Task(key="held-out")]).ended.wait()
        held_out = [request for request in await read_requests(fleet) if request.split == "eval"]
        assert Counter(request.seats[0].version for request in held_out) == {0: len(held_out)}
        assert {request.pinned_version for request in held_out} > {0, STEPS}
        journal = [entry async for entry in fleet.bus.scan([fleet.subjects.train("default")])]
        played = decode_entries(EvaluationFinished, [entry for entry in journal if b"EvaluationFinished" in entry.payload])
        assert [each.graded for _, each in played] == [3] * len(played)
        await expect_balance(fleet)


def play_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt draws an opponent of its own."""
    drawn = itertools.count()

    def draw(policies: Sequence[SeatPolicy]) -> Mapping[str, SeatPolicy]:
        return {seat.seat: replace(seat, version=next(drawn) % 2) for seat in policies}

    monkeypatch.setattr(attempt_runner, "map_by_seat", draw)


def serve_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are not pinned, and the worker answers from what it has."""
    ask = PolicyClient.ask

    def forget(self: PolicyClient, *given: Any, seats: EpisodeSeats = UNSEATED, **more: Any) -> Awaitable[Any]:
        unpinned = {name: replace(seat, version=None) for name, seat in seats._others.items()}
        return ask(self, *given, seats=_Unpinned(seats, unpinned), **more)

    @asynccontextmanager
    async def hold(self: SnapshotSampler, version: int | None) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(PolicyClient, "ask", forget)
    monkeypatch.setattr(SnapshotSampler, "hold", hold)


class _Unpinned(EpisodeSeats):
    """The seats of an attempt, with other policies in them."""

    def __init__(self, seats: EpisodeSeats, others: Mapping[str, SeatPolicy]) -> None:
        super().__init__(seats.current, others)


def train_the_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpisodeSeats, "_leave_to_its_policy", lambda self, seat: seat)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (play_another_version, "opponent_wrong"),
        (serve_the_newest_version, "opponent_wrong"),
        (train_the_opponent, "seats_wrong"),
    ],
)
async def test_a_planted_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    plant(monkeypatch)
    async with small_deployment(configure(tmp_path), published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet)
        with anyio.move_on_after(600):
            await learner.ended.wait()
        report = await audit_run(fleet.bus, fleet.subjects)
        assert kind in {finding.kind for finding in report.findings}
