"""Attempts whose Action is late share a read of the log, and only who would find something there wakes to look for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus, ConsumerFloor, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import observations_consumer, plan_run
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.core.episode.history import Turn
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import (
    ANY_LANE,
    Action,
    AttemptStarted,
    ControlAnswered,
    EpisodeRequested,
    Heartbeat,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.environment.episode import late_answers
from fleetbus_workers.environment.episode.lane_status import LaneStatus
from fleetbus_workers.environment.episode.late_answers import CHECKS_AT_ONCE, check_late_answers
from fleetbus_workers.environment.episode.policy_client import CHECKS_OF_QUEUE, PolicyClient
from fleetbus_workers.environment.episode.stages import Superseded
from fleetbus_workers.environment.worker_context import WorkerContext

SUBJECTS = Subjects("run")


class CountedBus:
    """A bus that counts reads. With ``fails`` the shared ones are not answered."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.fails = self.queue_fails = False
        self.in_work: tuple[str, ...] = ()
        self.shared: list[int] = []
        self.own: list[str] = []
        self.under_way = self.most_under_way = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        self.shared.append(len(subjects))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await anyio.lowlevel.checkpoint()
            if self.fails:
                raise RequestUnanswered("no answer")
            return await self._bus.last_of_each(subjects)
        finally:
            self.under_way -= 1

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> bytes:
        if subject != SUBJECTS.control("inference", "i", "ping"):
            raise NoResponders(subject)
        return encode(ControlAnswered(worker="i", role="inference", done=True, busy_with=self.in_work))

    async def ack_floors(self, consumers: Sequence[str] = ()) -> list[ConsumerFloor]:
        if self.queue_fails:
            await anyio.sleep_forever()
        return await self._bus.ack_floors(consumers)

    async def history(self, subjects: Sequence[str]) -> list[StreamEntry]:
        self.own += subjects
        return await self._bus.history(subjects)


class Waiting:
    """Attempts of one worker that have published their observations and wait."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.lane_status = LaneStatus(bus, SUBJECTS, lambda _: None)
        self.clients: dict[str, PolicyClient] = {}
        self.answers: dict[str, Turn | Superseded] = {}

    async def check(self, times: int = 1) -> None:
        """As the worker's timer does, at a time when everybody is late; whoever wakes has finished its own check after it."""
        for _ in range(times):
            late = anyio.current_time() + 3600
            await check_late_answers(self.bus, self.lane_status, list(self.clients.values()), late)
            await anyio.wait_all_tasks_blocked()

    async def play(self, episode: str, client: PolicyClient) -> None:
        try:
            self.answers[episode] = await client.ask(0, (), (), tokens_left=9)
        except Superseded as superseded:
            self.answers[episode] = superseded


@asynccontextmanager
async def waiting(count: int, *, lane: str = ANY_LANE, worker: str = "i", policy: str = "default") -> AsyncIterator[Waiting]:
    async with MemoryServer().connect("run", worker="w") as memory, anyio.create_task_group() as tasks:
        await memory.declare(plan_run("run", lanes=2))
        group = Waiting(CountedBus(memory))
        context = WorkerContext(
            bus=group.bus,
            subjects=SUBJECTS,
            worker="w",
            lane="e000",
            settings=EnvironmentSettings(),
            limits=LimitSettings(late=60.0),
            make=lambda _: pytest.fail("no environment is made"),
            nonce=str,
        )
        for number in range(count):
            episode = f"e{number}"
            request = EpisodeRequested(
                episode_id=episode,
                group_id="g",
                sample_index=0,
                split="train",
                task=Task(key="t", prompt="p"),
                policy=policy,
                deadline_ns=2**62,
            )
            claim = claim_of(episode, 1)
            history: tuple[Turn, ...] = ()
            if lane != ANY_LANE:
                before = Action(episode_id=episode, attempt=0, turn=0, text="", lane=lane, worker=worker)
                history = (Turn(sequence=0, lane="e001", action=before),)
            stored = await memory.publish(SUBJECTS.episode(episode), encode(claim))
            client = group.clients[episode] = PolicyClient(
                context,
                group.lane_status,
                request=request,
                claim=claim,
                claim_sequence=stored.sequence,
                history=history,
                action_sequence=0,
            )
            tasks.start_soon(group.play, episode, client)
        await anyio.wait_all_tasks_blocked()
        yield group
        tasks.cancel_scope.cancel()


def claim_of(episode: str, attempt: int) -> AttemptStarted:
    return AttemptStarted(episode_id=episode, attempt=attempt, worker="w", nonce=f"n{attempt}", lane="e000")


async def test_many_that_are_late_at_once_share_few_reads_one_after_another() -> None:
    async with waiting(2 * CHECKS_AT_ONCE + 1) as group:
        await group.check()
        assert group.bus.shared == [2 * CHECKS_AT_ONCE, 2 * CHECKS_AT_ONCE, 2]
        assert (group.bus.most_under_way, group.bus.own, group.answers) == (1, [], {})


async def test_an_action_whose_delivery_was_lost_is_found_by_the_next_read() -> None:
    async with waiting(3) as group:
        action = Action(episode_id="e1", attempt=1, turn=0, text="here")
        await group.bus.publish(SUBJECTS.action("e000", "e1"), encode(action))
        await group.check()
        answer = group.answers.pop("e1")
        assert isinstance(answer, Turn) and answer.action == action
        assert group.answers == {} and group.bus.own == [SUBJECTS.episode("e1")]


async def test_an_attempt_that_is_answered_during_the_shared_read_is_not_late_any_more() -> None:
    async with waiting(2) as group:
        read, action = group.bus.last_of_each, Action(episode_id="e0", attempt=1, turn=0, text="here")

        async def read_once_it_came(subjects: Sequence[str]) -> list[StreamEntry]:
            stored = await group.bus.publish(SUBJECTS.action("e000", "e0"), encode(action))
            group.clients["e0"].deliver(stored.sequence, action)
            await anyio.wait_all_tasks_blocked()
            found: list[StreamEntry] = await read(subjects)
            return found

        group.bus.last_of_each = read_once_it_came
        await group.check()
        assert list(group.answers) == ["e0"]
        assert [client.is_late(anyio.current_time() + 3600) for client in group.clients.values()] == [False, True]


async def test_a_turn_of_a_lane_that_drains_is_sent_to_any_though_its_worker_still_has_it() -> None:
    async with waiting(1, lane="i000") as group:
        group.bus.in_work = ("e0.1.0",)
        group.lane_status._apply_heartbeat(Heartbeat(role="inference", worker="i", slots=1, lane="i000", draining=True))
        await group.check()
        assert await group.bus.last(SUBJECTS.observation("default", ANY_LANE, "e0")) is not None


async def test_an_attempt_that_was_superseded_ends_and_the_others_wait_on() -> None:
    async with waiting(3) as group:
        await group.bus.publish(SUBJECTS.episode("e2"), encode(claim_of("e2", 2)))
        await group.check()
        assert list(group.answers) == ["e2"] and isinstance(group.answers["e2"], Superseded)


async def test_an_observation_that_the_log_has_lost_is_sent_again() -> None:
    async with waiting(2) as group:
        subject = SUBJECTS.observation("default", ANY_LANE, "e0")
        first = (await group.bus.last(subject)).sequence
        await group.check(CHECKS_OF_QUEUE)
        assert (await group.bus.last(subject)).sequence == first and group.bus.own == []
        await group.bus.purge(subject, below=first + 1)
        await group.check()
        assert (await group.bus.last(subject)).sequence > first
        assert group.bus.own == [SUBJECTS.episode("e0")]


async def test_an_observation_that_was_acked_without_an_action_is_sent_again() -> None:
    async with waiting(1) as group:
        subject = SUBJECTS.observation("default", ANY_LANE, "e0")
        first = (await group.bus.last(subject)).sequence
        async with group.bus.pull(observations_consumer("default", ANY_LANE), credits=1) as subscription:
            await (await subscription.receive()).ack()
        await group.check(CHECKS_OF_QUEUE)
        assert (await group.bus.last(subject)).sequence > first


async def test_a_read_that_is_not_answered_wakes_nobody_and_is_made_again() -> None:
    async with waiting(CHECKS_AT_ONCE + 1) as group:
        await group.bus.publish(SUBJECTS.action("e000", "e0"), encode(Action(episode_id="e0", attempt=1, turn=0, text="here")))
        group.bus.fails = True
        await group.check()
        assert (len(group.bus.shared), group.bus.own) == (1, [])
        group.bus.fails = False
        await group.check()
        assert list(group.answers) == ["e0"]


async def test_a_turn_that_its_inference_worker_does_not_have_is_sent_to_any_and_one_that_it_has_waits_on() -> None:
    async with waiting(2, lane="i000") as group:
        group.bus.in_work = ("e0.1.0",)
        await group.check(3)
        sent = [await group.bus.last(SUBJECTS.observation("default", ANY_LANE, episode)) for episode in ("e0", "e1")]
        assert sent[0] is None and sent[1] is not None
        assert set(group.bus.own) == {SUBJECTS.episode("e1")}


async def test_an_action_is_found_though_nobody_says_how_far_the_queue_is_acked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_answers, "ANSWER_SECONDS", 0.01)
    async with waiting(2) as group:
        await group.check(CHECKS_OF_QUEUE)
        group.bus.queue_fails = True
        await group.bus.publish(SUBJECTS.action("e000", "e0"), encode(Action(episode_id="e0", attempt=1, turn=0, text="here")))
        await group.check()
        assert list(group.answers) == ["e0"] and group.bus.own == [SUBJECTS.episode("e0")]


async def test_an_attempt_whose_policy_has_no_consumer_waits_on_and_takes_an_action_nevertheless() -> None:
    async with waiting(1, policy="undeclared") as group:
        await group.check(CHECKS_OF_QUEUE)
        group.clients["e0"].recheck()
        await anyio.wait_all_tasks_blocked()
        assert group.answers == {}
        await group.bus.publish(SUBJECTS.action("e000", "e0"), encode(Action(episode_id="e0", attempt=1, turn=0, text="here")))
        await group.check()
        assert list(group.answers) == ["e0"]


async def test_an_attempt_that_waits_for_hours_is_still_checked() -> None:
    async with waiting(1) as group:
        await group.check(1100)  # doubled as often, the pause would be more than a float holds
        await group.bus.publish(SUBJECTS.action("e000", "e0"), encode(Action(episode_id="e0", attempt=1, turn=0, text="here")))
        await group.check()
        assert list(group.answers) == ["e0"]


async def test_a_lane_without_a_named_worker_is_not_waited_for_without_end() -> None:
    async with waiting(1, lane="i000", worker="") as group:
        await group.check(3)
        assert await group.bus.last(SUBJECTS.observation("default", ANY_LANE, "e0")) is not None


@pytest.mark.parametrize(("lane", "worker"), [("", "i"), ("i000", ""), ("", "")])
async def test_after_an_action_that_does_not_say_who_sampled_it_the_next_turn_goes_to_any(lane: str, worker: str) -> None:
    async with waiting(1, lane=lane, worker=worker) as group:
        assert await group.bus.last(SUBJECTS.observation("default", ANY_LANE, "e0")) is not None
        assert group.clients["e0"].asked_worker == ""


async def test_nobody_drains_the_lane_of_all_workers() -> None:
    told: list[str] = []
    lane_status = LaneStatus(None, SUBJECTS, told.append)  # type: ignore[arg-type]
    for lane in (ANY_LANE, "i000"):
        lane_status._apply_heartbeat(Heartbeat(role="inference", worker=f"of-{lane}", slots=1, lane=lane, draining=True))
    assert told == ["i000"] and lane_status.is_usable(ANY_LANE)
