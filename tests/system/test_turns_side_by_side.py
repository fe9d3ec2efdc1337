"""Turns of one episode that do not stand on each other are sampled at the same time, and each has its own answer once, whoever
is killed when: what is trained in the end is what is trained of turns that were sampled one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import EnvironmentSettings, EpisodeSettings, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.core.training.groups import Group
from fleetbus.log.stored_entries import decode_one, read_stored
from fleetbus_schemas import (
    Action,
    ChatMessage,
    ContextChange,
    EpisodeFinished,
    Observation,
    SamplingSettings,
    StepTrained,
    Task,
    decode,
    encode,
)
from fleetbus_schemas.message import M
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Ahead, Start, Step, Verdict
from fleetbus_workers.inference import observation_handler
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.digest_audit import DigestReport, audit_digests
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN, Connect, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_segments_taken_over import ENGINES, ENVIRONMENTS, Killer, Rendering, Trained

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

SEATS = ("a", "b", "c", "d")
ROUNDS = 3
TURNS = ROUNDS * len(SEATS)
REWARDS = {"a": 1.0, "b": -0.5, "c": 0.25, "d": None}
SAMPLED_SECONDS = 1.0
MOVED = SamplingSettings(max_tokens=8)


def show(round_number: int, seat: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=f"round {round_number} for {seat}"),)


class Round(ScriptedEnvironment):
    """Four seats that move at once, three times. ``stepped`` hears the number of each step."""

    def __init__(self, stepped: Callable[[int], None] = lambda _: None, *, replayable: bool = True) -> None:
        super().__init__(TURNS)
        self.replayable = replayable
        self._stepped = stepped
        self.moves: list[str] = []

    async def open(self, task: Task) -> None:
        await super().open(task)
        self._stepped(0)

    async def reset(self) -> Start:
        await super().reset()
        return Start(messages=show(0, "a"), seat="a", ahead=self._tell(0))

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        self.moves.append(action.text)
        self._stepped(self._played)
        number, place = divmod(self._played, len(SEATS))
        return Step(
            messages=show(number, SEATS[place]),
            terminated=step.terminated,
            seat=SEATS[place],
            ahead=self._tell(number) if not place and not step.terminated else (),
        )

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5, seats=dict(REWARDS))

    @staticmethod
    def _tell(number: int) -> tuple[Ahead, ...]:
        return tuple(Ahead(messages=show(number, seat), seat=seat) for seat in SEATS[1:])


class Untold(Round):
    """The same game by one turn after another."""

    @staticmethod
    def _tell(number: int) -> tuple[Ahead, ...]:
        return ()


class Helpers(Round):
    """One policy with sub-agents, whose first turns and whose second ones are sampled at once; no seats."""

    async def reset(self) -> Start:
        start = await super().reset()
        return Start(messages=start.messages, ahead=start.ahead)

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        context = _find_context(self._played) if self._played % len(SEATS) else ContextChange(resume=0)
        return Step(messages=step.messages, terminated=step.terminated, context=context, ahead=step.ahead)

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5)

    @staticmethod
    def _tell(number: int) -> tuple[Ahead, ...]:
        places = range(1, len(SEATS))
        turns = [number * len(SEATS) + place for place in places]
        return tuple(Ahead(messages=show(number, SEATS[turn % 4]), context=_find_context(turn)) for turn in turns)


def _find_context(turn: int) -> ContextChange:
    return ContextChange(reason="sub_agent") if turn < len(SEATS) else ContextChange(resume=turn % len(SEATS))


class Liar(Round):
    """Asks something else than it told ahead."""

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return msgspec.structs.replace(step, messages=show(9, "z")) if self._played == 2 else step


class Slow(ScriptedSampler):
    """Takes its time, and counts who is sampled at once."""

    def __init__(self, asked: Callable[[int], None] = lambda _: None, counted: Counter[str] | None = None) -> None:
        super().__init__()
        self._asked = asked
        self._counted = Counter[str]() if counted is None else counted

    async def generate(self, request: GenerationRequest) -> Generation:
        self._counted["calls"] += 1
        self._counted["now"] += 1
        self._counted["most"] = max(self._counted["most"], self._counted["now"])
        try:
            await anyio.sleep(SAMPLED_SECONDS / 2)
            self._asked(request.seed)
            await anyio.sleep(SAMPLED_SECONDS / 2 + (request.seed % 7) / 100)
            return await super().generate(request)
        finally:
            self._counted["now"] -= 1


class Played(msgspec.Struct):
    """What became of one episode."""

    result: EpisodeFinished
    trained: Trained
    seconds: float
    sampled: Counter[str]
    environments: list[Round]
    entries: list[StreamEntry]


async def play(
    killer: Killer | None = None,
    *,
    make: Callable[..., Round] = Round,
    connected: Connect | None = None,
    **settings: Any,
) -> Played:
    """One episode among two workers of each role, of which the killer may kill one."""
    killer = killer or Killer("", ("", 0))
    configuration = build_configuration(limits=PATIENT, environment=EnvironmentSettings(slots=8, **settings))
    sampled, environments = Counter[str](), list[Round]()

    def make_one(name: str) -> Round:
        environments.append(make(partial(killer.stepped, name)))
        return environments[-1]

    async with small_deployment(configuration, connect=connected) as fleet:
        killer.fleet = fleet
        members = [fleet.environment(name, make=partial(make_one, name)) for name in ENVIRONMENTS]
        members += [fleet.inference(name, sampler=Slow(partial(killer.asked, name), sampled)) for name in ENGINES]
        await fleet.heard(*members)
        await anyio.sleep(5)  # until the environment workers have heard of both engines
        began = anyio.current_time()
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        result = await fleet.result("e")
        seconds = anyio.current_time() - began
        groups = [Group(group_id="g", size=1, results={"e": result})] if result.outcome == "completed" else []
        sequences = await read_sequences(fleet.bus, fleet.subjects, groups, plan=CreditPlan(), temperature=1.0)
        assert not any(group.unusable for group in groups)
        await check_one_action_per_turn(fleet)
        turns = [(action.attempt, action.turn) for action in await fleet.actions()]
        assert turns == sorted(turns), "the Actions of an attempt stand in the log in the order of their turns"
        report = await audit_run(fleet.bus, fleet.subjects)
        assert not report.findings, report.findings
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    trained = [(one.segment, one.ids.tolist(), one.loss_mask.tolist(), one.logprobs.tolist()) for one in sequences]
    return Played(result, trained, seconds, sampled, environments, entries)


@pytest.mark.parametrize("make", [Round, Helpers])
async def test_turns_that_were_told_ahead_are_sampled_at_once_and_trained_as_if_they_were_not(make: type[Round]) -> None:
    one_by_one = await play(make=make, turns_at_once=1)
    together = await play(make=make)
    assert one_by_one.sampled["most"] == 1 and together.sampled["most"] == len(SEATS)
    assert one_by_one.seconds > TURNS * SAMPLED_SECONDS
    assert together.seconds < ROUNDS * SAMPLED_SECONDS + 1.5, "a round takes as long as one turn"
    assert together.trained == one_by_one.trained
    assert together.result.segments == one_by_one.result.segments
    assert together.result.seats == one_by_one.result.seats
    assert together.environments[0].moves == one_by_one.environments[0].moves, "each turn has its own answer"


async def test_an_environment_that_tells_nothing_is_asked_one_turn_after_another() -> None:
    untold = await play(make=Untold)
    assert untold.sampled["most"] == 1
    assert untold.trained == (await play()).trained


@pytest.mark.parametrize("make", [Round, Helpers])
async def test_a_kill_at_any_point_gives_each_turn_its_own_answer_once(make: type[Round]) -> None:
    expected = await play(make=make)
    points = [("environment", ("stepped", step)) for step in range(1, TURNS)]
    points += [(role, ("asked", turn)) for role in ("environment", "inference") for turn in range(TURNS)]
    for role, point in points:
        killer = Killer(role, point)
        disturbed = await play(killer, make=make)
        assert killer.killed.startswith(role), (role, point)
        assert disturbed.result.outcome == "completed", (role, point, disturbed.result.error)
        assert disturbed.result.seats == expected.result.seats, (role, point)
        assert disturbed.trained == expected.trained, (role, point)
        assert disturbed.environments[-1].moves == expected.environments[0].moves, (role, point)


async def test_a_takeover_of_an_environment_that_cannot_repeat_its_steps_begins_anew() -> None:
    make = partial(Round, replayable=False)
    expected = await play(make=make)
    disturbed = await play(Killer("environment", ("asked", 6)), make=make)
    assert (disturbed.result.attempts, disturbed.trained) == (2, expected.trained)


async def test_what_an_environment_told_ahead_it_has_to_ask() -> None:
    result = (await play(make=Liar)).result
    assert (result.outcome, result.error_class) == ("env_failed", "told_ahead"), result.error
    assert "turn 2 shows something else" in result.error


async def test_turns_go_one_after_another_to_workers_that_do_not_take_them_ahead() -> None:
    """As those of an earlier version, which nobody has heard say that they do."""
    sampled = Counter[str]()
    configuration = build_configuration(limits=PATIENT)
    async with small_deployment(configuration) as fleet:
        member = fleet.inference("i1", sampler=Slow(counted=sampled), template=Rendering())
        await fleet.heard(member, fleet.environment("e1", make=partial(Round, lambda _: None)))
        await anyio.sleep(5)
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        result = await fleet.result("e")
        assert not fleet.beats["i1"].takes_ahead
        assert all(not observation.ahead for observation in await fleet.observations())
    assert (result.outcome, sampled["most"]) == ("completed", 1), result.error


async def test_turns_after_that_of_another_policy_are_sent_ahead_as_the_own_policys_workers_take_them() -> None:
    """Whatever those of the other policy do."""
    settings = {"run": RunSettings(name=RUN, seats="b=other"), "environment": EnvironmentSettings(slots=8)}
    async with small_deployment(build_configuration(limits=PATIENT, **settings)) as fleet:
        members = [fleet.environment("e1", make=partial(Round, lambda _: None)), fleet.inference("i1", sampler=Slow())]
        members += [fleet.inference("i2", sampler=Slow(), template=Rendering(), policy="other")]
        await fleet.heard(*members)
        await anyio.sleep(5)
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        result = await fleet.result("e")
        ahead = {observation.seat for observation in await fleet.observations() if observation.ahead}
    assert (result.outcome, ahead) == ("completed", {"d"}), result.error


async def test_a_worker_of_an_earlier_version_that_was_not_heard_of_yet_stores_nothing_out_of_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not know that an observation is sent ahead, and expects the sequence that it carries."""
    expected = await play()

    def decode_as_before(kind: type[M], entry: StreamEntry) -> M:
        decoded = decode_one(kind, entry)
        return msgspec.structs.replace(decoded, ahead=0) if isinstance(decoded, Observation) else decoded

    monkeypatch.setattr(observation_handler, "decode_one", decode_as_before)
    played = await play()
    assert (played.result.outcome, played.trained) == ("completed", expected.trained), played.result.error


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("role", ["environment", "inference"])
async def test_a_kill_on_a_real_server_leaves_each_turn_its_own_answer(role: str, tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        connected = partial(connect, server.url, run=RUN)
        killer = Killer(role, ("asked", 5))
        with anyio.fail_after(100):
            disturbed = await play(killer, connected=lambda name: connected(worker=name))
    assert killer.killed.startswith(role)
    assert disturbed.result.outcome == "completed", disturbed.result.error
    assert len(set(disturbed.environments[-1].moves)) == TURNS, "each turn has an answer of its own"


async def test_what_was_trained_of_them_is_proved_by_the_deep_audit(tmp_path: Path) -> None:
    """Also of an answer that is put where that of another turn belongs."""
    configuration = build_configuration(
        limits=PATIENT,
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=2, groups=2, group_size=2),
        episode=EpisodeSettings(max_turns=TURNS),
        evaluation=EvaluationSettings(episodes=0),
    )
    tasks = [Task(key=f"task-{number}", prompt="play", config={"turns": TURNS}) for number in range(2)]
    async with small_deployment(configuration) as fleet:
        workers = [fleet.environment(name, make=Round) for name in ENVIRONMENTS]
        workers += [fleet.inference(name, sampler=Slow()) for name in ENGINES]
        await fleet.heard(*workers)
        await anyio.sleep(5)
        learner = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(tasks, tasks, seed=1))
        await learner.ended.wait()
        assert learner.failure() is None
        await fleet.drain_members(workers)
        assert (await audit_run(fleet.bus, fleet.subjects)).balanced
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    assert sum(observation.ahead > 0 for observation in decode_all(Observation, entries)) > TURNS
    report = await audit_log(entries)
    assert report.proven == 2 * 2 * 2 and not report.findings, report.findings
    trained = {episode for step in decode_all(StepTrained, entries) for episode in step.episodes}
    acts = [number for number, entry in enumerate(entries) if entry.subject.split(".")[2] == "act"]
    acts = [number for number in acts if entries[number].subject.rpartition(".")[2] == min(trained)]
    first, second = (decode(Action, entries[number].payload, subject="") for number in acts[1:3])
    exchanged = msgspec.structs.replace(first, sampled=second.sampled, logprobs=second.logprobs)
    entries[acts[1]] = msgspec.structs.replace(entries[acts[1]], payload=encode(exchanged))
    assert (await audit_log(entries)).findings


def decode_all(kind: type[M], entries: list[StreamEntry]) -> list[M]:
    return [message for entry in entries if isinstance(message := read_stored(entry), kind)]


async def audit_log(entries: list[StreamEntry]) -> DigestReport:
    async def scan() -> AsyncIterator[StreamEntry]:
        for entry in entries:
            yield entry

    return await audit_digests(scan, last_sequence=entries[-1].sequence)
