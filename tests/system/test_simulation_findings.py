"""Findings of the simulation: each defect as a small test of its own, in the words of what has to hold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import fleetbus_workers.environment.stepwise.journal_reads as journal_reads
from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.core.episode.journal import Journal
from fleetbus.core.training.groups import Group
from fleetbus.delivery.requests import Requests
from fleetbus.log.actions import MissingActions, are_lost, read_actions
from fleetbus.log.archive_writer import open_archive
from fleetbus_schemas import (
    Action,
    ActionReference,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    LineageStarted,
    PolicyPublished,
    SessionAnswer,
    SessionCall,
    Subjects,
    Task,
    VersionSpan,
    decode,
    encode,
)
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.gateway.gym_methods import Answer, GymCalls
from fleetbus_workers.gateway.gym_wire import Request
from fleetbus_workers.inference.base import Generation, GenerationRequest, WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.journal import FencedAppender, LearnerReplaced
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.resume import MadeVersion
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.simulation.run import run_seed
from tests.support.single_engine import HeldSampler, inference_worker, make_first_observation
from tests.support.small_deployment import run_inline
from tests.support.stepwise_fixtures import World as SessionWorld
from tests.support.stepwise_fixtures import session_fixture
from tests.support.virtual_time import virtual_time

RUN = "findings"
PORTS = Runtime(offload=run_inline)
SUBJECTS = Subjects(RUN)
TRAIN, POLICY = SUBJECTS.train("default"), SUBJECTS.policy("default")

anyio_backend = virtual_time


@asynccontextmanager
async def connected() -> AsyncIterator[MemoryBus]:
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        yield bus


def started(lineage: str) -> LineageStarted:
    return LineageStarted(lineage=lineage, worker=f"learner of {lineage}")


def published(version: int, lineage: str = "l1") -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=version, lineage=lineage, step=version, uri="file:///none", manifest=(), size_bytes=0
    )


async def begun(bus: MemoryBus, lineage: str) -> tuple[FencedAppender, LineageStarted]:
    """A learner that has announced its lineage, and nothing more."""
    last = await bus.last(TRAIN)
    chain = FencedAppender(bus, TRAIN, last.sequence if last else 0)
    await chain.append(started(lineage))
    return chain, started(lineage)


async def test_a_learner_that_was_replaced_while_it_began_takes_nothing_over() -> None:
    async with connected() as bus:
        _, message = await begun(bus, "l1")
        _, newer_message = await begun(bus, "l2")
        policies = FencedAppender(bus, POLICY, 0)
        await policies.take_over(newer_message)
        with pytest.raises(LearnerReplaced):
            await FencedAppender(bus, POLICY, 0).take_over(message)
        await policies.append(published(0, "l2"))


async def test_a_learner_whose_replica_does_not_know_its_successor_yet_takes_nothing_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reads of the book lag behind its reads of the policy: any replica answers them."""
    async with connected() as bus:
        last, (_, message), (_, newer_message) = bus.last, await begun(bus, "l1"), await begun(bus, "l2")
        await FencedAppender(bus, POLICY, 0).take_over(newer_message)

        async def lagging(subject: str) -> StreamEntry | None:
            return (await bus.history([subject]))[0] if subject == TRAIN else await last(subject)

        monkeypatch.setattr(bus, "last", lagging)
        with pytest.raises(LearnerReplaced):
            await FencedAppender(bus, POLICY, 0).take_over(message)


@pytest.mark.integration
def test_a_learner_may_begin_while_the_entry_of_the_one_before_is_on_its_way() -> None:
    """The first one's start reaches the policy's subject between the second one's starts on both subjects: in their order."""
    report = run_seed(910_000)
    assert report.passed, report.violations


async def test_a_learner_that_begins_counts_on_from_what_was_published_until_then(tmp_path: Path) -> None:
    async with connected() as bus:
        _, message = await begun(bus, "l1")
        await bus.publish(POLICY, encode(published(6)))
        publication = Publication(
            bus, SUBJECTS, ScriptedTrainer(), policy="default", lineage="l1", folder=tmp_path, keep=2, runtime=Runtime()
        )
        assert await publication.fence(message) == {6: MadeVersion("l1", 6, window=0)}
        assert await publication.publish(0) == 7


async def test_a_replaced_learner_that_has_nothing_to_append_is_told() -> None:
    async with connected() as bus:
        chain, _ = await begun(bus, "l1")
        with anyio.fail_after(5), pytest.raises(ExceptionGroup) as raised:
            async with anyio.create_task_group() as group:
                group.start_soon(chain.watch)
                await begun(bus, "l2")
        assert raised.group_contains(LearnerReplaced)


async def test_a_request_that_another_learner_made_comes_with_its_result() -> None:
    async with connected() as bus:
        requests = Requests(bus, SUBJECTS, configuration=Configuration(run=RunSettings(name=RUN)), worker="learner")
        request = EpisodeRequested(
            episode_id="g000000-0",
            group_id="g000000",
            sample_index=0,
            split="train",
            task=Task(key="task"),
            policy="default",
            deadline_ns=bus.now_ns() + 10**12,
        )
        stored = await requests.publish(request)
        assert stored.result is None
        finished = EpisodeFinished(
            episode_id="g000000-0", group_id="g000000", attempt=1, outcome="completed", worker="e", reward=1.0
        )
        claim = AttemptStarted(episode_id="g000000-0", attempt=1, worker="e", nonce="n", lane="e0")
        await bus.publish(SUBJECTS.episode("g000000-0"), encode(claim))
        await bus.publish(SUBJECTS.episode("g000000-0"), encode(finished))
        assert await requests.publish(request) == msgspec.structs.replace(stored, result=finished)


class OnceRejecting(ScriptedSampler):
    """Takes version 0, and version 1 only when it is asked to for the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.has_first, self.has_both = anyio.Event(), anyio.Event()

    async def load(self, policy: PolicyPublished) -> None:
        self.asked.append(policy.version)
        if self.asked == [0, 1]:
            raise WeightsRejected("the file is not there yet")
        await super().load(policy)
        (self.has_both if policy.version else self.has_first).set()


async def test_a_version_that_was_rejected_is_tried_again() -> None:
    sampler = OnceRejecting()
    async with connected() as bus:
        with anyio.fail_after(60):
            async with inference_worker(bus, RUN, sampler):
                await bus.publish(POLICY, encode(published(0)))
                await sampler.has_first.wait()
                await bus.publish(POLICY, encode(published(1)))
                await sampler.has_both.wait()
    assert sampler.asked == [0, 1, 1]
    assert sampler.version == 1


async def test_an_observation_that_was_routed_again_is_answered_where_the_one_before_it_is_refused() -> None:
    """A late Action of an earlier attempt came between: the first expects it not to be there, the second expects it."""
    sampler = HeldSampler()
    async with connected() as bus:
        observation = make_first_observation(bus, attempt=2)
        subject, actions = SUBJECTS.observation("default", "any", "e"), SUBJECTS.action("e0", "e")
        with anyio.fail_after(600):
            async with bus.read([actions], start=1) as answers, inference_worker(bus, RUN, sampler):
                await bus.publish(POLICY, encode(published(0)))
                await bus.publish(subject, encode(observation))
                await sampler.asked.wait()
                late = await bus.publish(actions, encode(Action(episode_id="e", attempt=1, turn=0, worker="other", text="")))
                await bus.publish(subject, encode(msgspec.structs.replace(observation, hop=1, action_sequence=late.sequence)))
                await anyio.sleep(1)  # of virtual time: it has been delivered then
                sampler.let_go.set()
                assert decode(Action, (await answers.receive()).payload).worker == "other"
                answer = decode(Action, (await answers.receive()).payload)
    assert (answer.attempt, answer.hop, answer.finish_reason) == (2, 1, "stop")


async def played(bus: MemoryBus) -> tuple[list[Action], EpisodeFinished]:
    """The two Actions of an episode, stored first of all, and its result."""
    actions = [Action(episode_id="e", attempt=1, turn=turn, worker="i", text=f"turn {turn}") for turn in range(2)]
    for action in actions:
        await bus.publish(SUBJECTS.action("e0", "e"), encode(action))
    references = tuple(ActionReference(sequence=turn + 1, lane="e0", turn=turn) for turn in range(2))
    return actions, EpisodeFinished(
        episode_id="e", group_id="g", attempt=1, outcome="completed", worker="e", reward=1.0, actions=references
    )


async def test_actions_that_were_trimmed_are_read_from_the_archive_and_without_it_the_error_says_what_to_give(
    tmp_path: Path,
) -> None:
    async with connected() as bus:
        actions, result = await played(bus)
        with open_archive(tmp_path, RUN) as archive:
            archive.append([entry async for entry in bus.scan([SUBJECTS.log])])
        await bus.purge(SUBJECTS.actions(), below=2)
        assert await read_actions(bus, SUBJECTS, [result], archive=tmp_path, runtime=PORTS) == {"e": actions}
        with pytest.raises(MissingActions, match=r"position 1; .*learner.archive"):
            await read_actions(bus, SUBJECTS, [result], archive=None, runtime=PORTS)


async def test_an_episode_whose_actions_the_log_has_lost_leaves_its_group_with_the_reason() -> None:
    """Without it every learner that reads that result ends of it."""
    server = MemoryServer()
    async with server.connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        files = server.copy_files()
        _, result = await played(bus)
        server.put_back(files)
        await bus.publish(SUBJECTS.episode("another"), b"x")
        group = Group(group_id="g", size=1, results={"e": result})
        assert await read_sequences(bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, runtime=PORTS) == []
    assert group.excluded == [Exclusion(episode_id="e", reason="actions_lost")]


async def test_an_action_that_stands_where_the_result_says_is_not_lost_however_late_it_is_read() -> None:
    async with connected() as bus:
        _, result = await played(bus)
        position, subject = result.actions[0].sequence, SUBJECTS.action("e0", "e")

        async def is_lost(subject: str, sequence: int) -> bool:
            return await are_lost(bus, SUBJECTS, MissingActions("e", subject, sequence, ""))

        assert not await is_lost(subject, position)
        assert await is_lost(SUBJECTS.action("e0", "another"), position)
        assert await is_lost(SUBJECTS.action("e1", "e"), position)
        assert await is_lost(subject, (await bus.log_state()).last_sequence + 1)
        await bus.purge(SUBJECTS.actions(), below=position + 1)
        assert not await is_lost(subject, position)  # trimmed: an archive may have it


@pytest.mark.parametrize("changed", [{"turn": 1}, {"lane": "e1"}, {"sequence": 3}])
async def test_an_episode_whose_result_names_other_actions_than_its_turns_leaves_its_group_with_the_reason(
    changed: dict[str, Any],
) -> None:
    """It would be trained with tokens of another turn, or of another episode of the batch, or end every learner."""
    async with connected() as bus:
        _, result = await played(bus)
        honest_action = Action(episode_id="f", attempt=1, turn=0, text="", prompt_delta=pack_ids([1]))
        other = await bus.publish(SUBJECTS.action("e0", "f"), encode(honest_action))
        assert other.sequence == 3
        reference = msgspec.structs.replace(result.actions[0], **changed)
        forged = msgspec.structs.replace(result, actions=(reference, *result.actions[1:]))
        honest = EpisodeFinished(
            episode_id="f", group_id="g", attempt=1, outcome="completed", worker="e", reward=0.0, tokens=1, loss_mask=b"\0",
            actions=(ActionReference(sequence=3, lane="e0", turn=0),),
        )  # fmt: skip
        group = Group(group_id="g", size=2, results={"e": forged, "f": honest})
        await read_sequences(bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, runtime=PORTS)
    assert group.excluded == [Exclusion(episode_id="e", reason="actions_lost")]


async def test_an_action_that_was_trimmed_and_stands_otherwise_in_the_archive_is_lost(tmp_path: Path) -> None:
    async with connected() as bus:
        _, result = await played(bus)
        with open_archive(tmp_path, RUN) as archive:
            archive.append([entry async for entry in bus.scan([SUBJECTS.log])])
        await bus.purge(SUBJECTS.actions(), below=2)
        forged = msgspec.structs.replace(result, actions=(msgspec.structs.replace(result.actions[0], lane="e1"),))
        with pytest.raises(MissingActions, match="position 1; something else stands there") as raised:
            await read_actions(bus, SUBJECTS, [forged], archive=tmp_path, runtime=PORTS)
        assert await are_lost(bus, SUBJECTS, raised.value)


async def test_actions_that_the_replica_that_answers_does_not_have_yet_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as bus:
        actions, result = await played(bus)
        history, behind = bus.history, iter((1, 1))

        async def lagging(subjects: Sequence[str]) -> list[StreamEntry]:
            entries = await history(subjects)
            return entries[: len(entries) - next(behind, 0)]

        monkeypatch.setattr(bus, "history", lagging)
        assert await read_actions(bus, SUBJECTS, [result], archive=None, runtime=PORTS) == {"e": actions}


async def test_a_reset_that_two_requests_repeat_after_a_failure_begins_one_environment() -> None:
    """A client of a gateway that repeats its request before the answer came: both get the same one."""
    world = SessionWorld()
    async with session_fixture() as here:
        here.worker("e1", world)
        calls = GymCalls(here.client, call_seconds=60)

        async def call(method: str, key: str) -> Answer:
            return await calls.call(Request(fields={"session_id": "c", "method": method, "params": {"seed": None}}, key=key))

        await calls.connect(Request(fields={"env_config": {"key": "t"}}, key="c"))
        await call("reset", "r1")
        world.error = RuntimeError("gone")
        assert (await call("step", "s1")).fields["done"]
        world.error = None
        answers: list[Answer] = []
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(lambda: collect(answers, call("reset", "r2")))
        assert answers[0] == answers[1]
        assert not (await call("step", "s2")).fields["done"]


async def collect(answers: list[Answer], answer: Awaitable[Answer]) -> None:
    answers.append(await answer)


async def test_a_session_is_unknown_only_where_no_replica_has_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened at one worker, and the call goes to another one, whose replica is behind."""
    async with session_fixture() as here:
        here.worker("e1", SessionWorld())
        await here.ask(SessionCall(session="s", call="open", key="o", task=Task(key="t")))
        behind, read = iter((True, True)), read_session_journal

        async def lagging(bus: MemoryBus, subjects: Subjects, session: str) -> Journal:
            return Journal() if next(behind, False) else await read(bus, subjects, session)

        monkeypatch.setattr(journal_reads, "read_session_journal", lagging)
        here.worker("e2", SessionWorld())
        await here.fleet.until(lambda: "e2" in here.fleet.beats and here.fleet.beats["e2"].session_slots > 0)
        reset, subject = SessionCall(session="s", call="reset", key="r"), here.fleet.subjects.rpc("e2", "s")
        answer = decode(SessionAnswer, await here.fleet.bus.request(subject, encode(reset), timeout=9))
        assert not answer.refusal


async def test_a_worker_that_lost_a_session_unawares_calls_no_call_of_it_a_mistake() -> None:
    """It knows of what it did itself only, so the next call of a caller that went on elsewhere seems to be out of order."""
    async with session_fixture() as here:
        lost = here.worker("e1", SessionWorld())
        await here.ask(SessionCall(session="s", call="open", key="o", task=Task(key="t")))
        lost.cut()
        here.worker("e2", SessionWorld())
        await here.ask(SessionCall(session="s", call="reset", key="r"))
        lost.mend()
        step, subject = SessionCall(session="s", call="step", key="k", text="one"), here.fleet.subjects.rpc("e1", "s")
        for call in (step, msgspec.structs.replace(step, number=2)):
            answer = decode(SessionAnswer, await here.fleet.bus.request(subject, encode(call), timeout=9))
            assert answer.refusal == "moved"


class SwappingSampler(ScriptedSampler):
    """Weights are swapped within every turn."""

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        versions = (VersionSpan(version=0, start=0, stop=4), VersionSpan(version=1, start=4, stop=8))
        return msgspec.structs.replace(generation, versions=versions)


async def test_a_turn_within_which_weights_were_swapped_is_none_of_a_pinned_version() -> None:
    async with connected() as bus:
        observation = msgspec.structs.replace(make_first_observation(bus), pinned_version=0)
        with anyio.fail_after(600):
            async with bus.read([SUBJECTS.action("e0", "e")], start=1) as read, inference_worker(bus, RUN, SwappingSampler()):
                await bus.publish(POLICY, encode(published(0)))
                await bus.publish(SUBJECTS.observation("default", "any", "e"), encode(observation))
                answer = decode(Action, (await read.receive()).payload)
    assert (answer.finish_reason, answer.error_class) == ("failed", "version_gone")
