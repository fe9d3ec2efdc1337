"""Requests are remembered until they are answered and no longer, and nothing that the server does ends whoever asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from fleetbus.bus.memory import Faults, MemoryBus, MemoryServer
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.streams import log_stream, plan_run
from fleetbus.config.settings import Configuration, EpisodeSettings, LimitSettings, NatsSettings, RunSettings
from fleetbus.core.episode.claim_seals import make_seal, without_verdict
from fleetbus.delivery.requests import Requests, StoredRequest
from fleetbus.log.episodes import read_episode_state
from fleetbus_schemas import AttemptStarted, EpisodeFinished, EpisodeRequested, Subjects, Task, decode, encode
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("r")
LIMITS = LimitSettings(episode=60, grace=10)

anyio_backend = virtual_time


class LostAnswer(Faults):
    """The first request is stored, and nobody is told."""

    told = False

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        lost = subject.startswith(SUBJECTS.task("default", "e")) and not self.told
        self.told = self.told or lost
        return PublishFault(lost="answer") if lost else NO_PUBLISH_FAULT


class World:
    def __init__(self, server: MemoryServer, bus: MemoryBus) -> None:
        self.server = server
        self.bus = bus
        configuration = Configuration(run=RunSettings(name="r"), limits=LIMITS, nats=NatsSettings(admission=0.5))
        self.requests = Requests(bus, SUBJECTS, configuration=configuration, worker="learner")

    def request(self, episode_id: str = "e") -> EpisodeRequested:
        return self.requests.build_request(
            Task(key="t", prompt="play"), episode_id=episode_id, group_id="g", sample_index=0, group_size=1, split="train",
            lineage="l1", version=0,
        )  # fmt: skip

    @property
    def remembered(self) -> int:
        return len(self.requests._open)


@asynccontextmanager
async def world(faults: Faults | None = None, *, max_bytes: int = 1 << 20) -> AsyncIterator[World]:
    server = MemoryServer(faults=faults)
    with anyio.fail_after(9000):
        async with server.connect("r", worker="learner") as bus:
            await bus.declare(plan_run("r", lanes=1, max_bytes=max_bytes))
            yield World(server, bus)


async def test_requests_of_training_alone_carry_the_reward_of_a_time_out() -> None:
    async with MemoryServer().connect("r", worker="learner") as bus:
        given = Configuration(run=RunSettings(name="r"), episode=EpisodeSettings(timeout_reward="-0.5"))
        found = []
        for configuration in (given, Configuration(run=RunSettings(name="r"))):
            requests = Requests(bus, SUBJECTS, configuration=configuration, worker="learner")
            named: dict[str, Any] = {
                "episode_id": "e",
                "group_id": "g",
                "sample_index": 0,
                "group_size": 1,
                "lineage": "l1",
                "version": 0,
            }
            found += [requests.build_request(Task(key="t"), split=split, **named) for split in ("train", "eval")]
    assert [request.timeout_reward for request in found] == [-0.5, None, None, None]


def finished(request: EpisodeRequested) -> EpisodeFinished:
    return EpisodeFinished(episode_id=request.episode_id, group_id="g", attempt=1, outcome="completed", worker="w", reward=1.0)


async def test_a_request_that_is_answered_before_its_author_knows_that_it_is_stored_is_not_remembered() -> None:
    async with world(LostAnswer()) as here:
        request = here.request()
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.publish, request)
            await anyio.sleep(1)
            here.requests.mark_answered(request.episode_id)
        assert here.remembered == 0


async def test_a_request_is_remembered_until_it_is_answered() -> None:
    async with world() as here:
        request = here.request()
        await here.requests.publish(request)
        assert here.remembered == 1
        here.requests.mark_answered(request.episode_id)
        assert here.remembered == 0


@pytest.mark.parametrize("answered", [True, False])
async def test_what_expired_gets_a_result_once_and_is_forgotten(answered: bool) -> None:
    async with world() as here:
        request = here.request()
        await here.requests.publish(request)
        if answered:
            await here.bus.publish(SUBJECTS.episode("e"), encode(finished(request)), expected_last=0)
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.close_expired)
            await anyio.sleep(300)
            group.cancel_scope.cancel()
        episode_state = await read_episode_state(here.bus, SUBJECTS, "e")
        assert episode_state.result is not None
        assert episode_state.result.outcome == ("completed" if answered else "timeout")
        assert here.remembered == 0


async def test_a_result_that_is_found_when_a_request_expires_is_told() -> None:
    """A reader that begins behind it does not tell of it."""
    async with world() as here:
        request, told = here.request(), list[EpisodeFinished]()
        await here.requests.publish(request)
        await here.bus.publish(SUBJECTS.episode("e"), encode(finished(request)), expected_last=0)
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.close_expired, told.append)
            await anyio.sleep(300)
            group.cancel_scope.cancel()
        assert told == [finished(request)]


@pytest.mark.parametrize("secret", ["", "own"])
async def test_a_result_that_is_read_back_has_no_verdict_unless_it_opens_the_seal_of_its_claim(secret: str) -> None:
    """Who was away, as a learner that was replaced, is told of it by the log's state and not by a reader of claims."""
    async with world() as here:
        request, told = here.request(), list[EpisodeFinished]()
        await here.requests.publish(request)
        claim = AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="e0", seal=make_seal("own"))
        claimed = await here.bus.publish(SUBJECTS.episode("e"), encode(claim), expected_last=0)
        result = msgspec.structs.replace(finished(request), opens=secret)
        await here.bus.publish(SUBJECTS.episode("e"), encode(result), expected_last=claimed.sequence)
        expected = result if secret else without_verdict(result)
        assert (await here.requests.publish(request)).result == expected
        here.requests.track(request, 1)
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.close_expired, told.append)
            await anyio.sleep(300)
            group.cancel_scope.cancel()
        assert told == [expected]


@pytest.mark.parametrize("hours", [-5, 5])
async def test_a_request_expires_after_its_time_whatever_the_servers_clock_is_set_to_meanwhile(hours: int) -> None:
    """Set forward, it ended all that were being played; set back, none that nobody played for as many hours."""
    async with world() as here:
        await here.requests.publish(here.request())
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.close_expired)
            here.server.step_clock(hours * 3600)
            await anyio.sleep(LIMITS.episode + LIMITS.grace - 1)
            assert (await read_episode_state(here.bus, SUBJECTS, "e")).result is None
            await anyio.sleep(10)
            group.cancel_scope.cancel()
        episode_state = await read_episode_state(here.bus, SUBJECTS, "e")
        assert episode_state.result is not None
        assert episode_state.result.outcome == "timeout"


async def test_a_request_of_a_learner_before_expires_after_the_time_of_an_episode_though_the_clock_was_set_back() -> None:
    """It has a deadline of hours ahead then, and stayed open for as long where nobody played it."""
    async with world() as here:
        stored = await here.requests.publish(here.request())
        here.server.step_clock(-5 * 3600)
        next_learner = World(here.server, here.bus).requests
        next_learner.track(stored.request, stored.sequence)
        async with anyio.create_task_group() as group:
            group.start_soon(next_learner.close_expired)
            await anyio.sleep(LIMITS.episode + LIMITS.grace - 1)
            assert (await read_episode_state(here.bus, SUBJECTS, "e")).result is None
            await anyio.sleep(10)
            group.cancel_scope.cancel()
        episode_state = await read_episode_state(here.bus, SUBJECTS, "e")
    assert episode_state.result is not None and episode_state.result.outcome == "timeout"


async def test_a_request_that_found_no_room_for_longer_than_an_episode_has_its_time_once_it_is_stored() -> None:
    """It was stored with its deadline over: a timeout, and where those have a reward, one that was trained. Its author knows
    it by the deadline that it has in the log: records name its trace by that."""
    published: list[StoredRequest] = []
    async with world() as here:

        async def publish() -> None:
            published.append(await here.requests.publish(here.request()))

        log = here.server.stream(log_stream("r"))
        plan = log.plan
        log.plan = msgspec.structs.replace(plan, max_bytes=max(log.size_bytes, 1))
        async with anyio.create_task_group() as group:
            group.start_soon(publish)
            group.start_soon(here.requests.close_expired)
            await anyio.sleep(3 * LIMITS.episode)
            log.plan = plan
            await anyio.sleep(LIMITS.episode - 5)
            stored = await here.bus.last(SUBJECTS.task("default", "e"))
            episode_state = await read_episode_state(here.bus, SUBJECTS, "e")
            group.cancel_scope.cancel()
    assert stored is not None and decode(EpisodeRequested, stored.payload).deadline_ns > stored.time_ns
    assert published == [StoredRequest(request=decode(EpisodeRequested, stored.payload), sequence=stored.sequence)]
    assert episode_state.result is None


async def test_a_request_that_another_learner_stored_is_known_by_the_deadline_that_it_has_in_the_log() -> None:
    async with world() as here:
        first = await here.requests.publish(here.request())
        await anyio.sleep(20)
        later = here.request()
        assert later.deadline_ns > first.request.deadline_ns
        assert await here.requests.publish(later) == first


async def test_a_server_that_is_away_when_requests_expire_ends_nobody() -> None:
    async with world() as here:
        await here.requests.publish(here.request())
        async with anyio.create_task_group() as group:
            group.start_soon(here.requests.close_expired)
            here.server.kill()
            await anyio.sleep(7200)
            here.server.restart()
            await anyio.sleep(120)
            group.cancel_scope.cancel()
        episode_state = await read_episode_state(here.bus, SUBJECTS, "e")
        assert episode_state.result is not None
        assert episode_state.result.outcome == "timeout"


async def test_a_server_that_is_away_while_the_log_is_full_ends_nobody_and_one_line_says_that_it_is_full() -> None:
    async with world(max_bytes=4096) as here:
        for number in range(9):
            await here.bus.publish(SUBJECTS.life("learner", f"w{number}"), b"x" * 250)
        with structlog.testing.capture_logs() as lines:
            async with anyio.create_task_group() as group:
                group.start_soon(here.requests.wait_for_room)
                await anyio.sleep(60)
                assert here.requests.full
                here.server.kill()
                await anyio.sleep(3600)
                here.server.restart()
                await anyio.sleep(60)
                await here.bus.purge(SUBJECTS.life("learner", "*"), below=9)
        assert not here.requests.full
        assert [line["event"] for line in lines].count("log is full; admission waits for room") == 1


async def test_what_others_asked_for_and_may_still_store_is_waited_for() -> None:
    """An evaluation by command and a learner fill one log together: each counted what it asked for itself only."""
    async with world(max_bytes=1 << 20) as here, here.server.connect("r", worker="other") as bus:
        other = World(here.server, bus)
        for number in range(12):  # 64 KiB each until one is measured
            await other.requests.publish(other.request(f"e{number}"))
        with anyio.move_on_after(30) as waiting:
            await here.requests.wait_for_room(4)
        assert waiting.cancelled_caught
        async with bus.pull("task_default", credits=12) as pulled:
            for _ in range(4):
                await (await pulled.receive()).ack()
            with anyio.fail_after(5):
                await here.requests.wait_for_room(4)


async def test_an_episode_is_measured_by_the_results_of_all_that_came_since_the_log_was_looked_at() -> None:
    """A learner that takes over reads old results, and the log grows by what others play as well."""
    async with world() as here:
        for number in range(20):
            await here.bus.publish(SUBJECTS.life("learner", f"w{number}"), b"x" * 1000)
        await here.requests.wait_for_room()
        for number in range(1, 21):
            here.requests.record_result(number, f"old{number}")
        for number in range(21, 25):
            await here.bus.publish(SUBJECTS.life("learner", f"w{number}"), b"x" * 9000)
            here.requests.record_result(number, f"other{number}")
        await here.requests.wait_for_room()
        assert 9000 < here.requests._room.bytes_per_episode < 9500


async def test_a_server_that_is_away_when_a_request_was_there_before_ends_nobody() -> None:
    async with world() as here:
        request, publish = here.request(), here.bus.publish
        await here.requests.publish(request)
        outages = [100.0]

        async def refused(*args: Any, **options: Any) -> Any:
            try:
                return await publish(*args, **options)
            finally:
                if outages:
                    here.server.kill()
                    group.start_soon(come_back, outages.pop())

        async def come_back(seconds: float) -> None:
            await anyio.sleep(seconds)
            here.server.restart()

        here.bus.publish = refused  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:
            assert await here.requests.publish(request) == StoredRequest(request=request, sequence=1)
        assert here.remembered == 1


async def test_a_replica_that_does_not_know_a_request_yet_that_was_there_before_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as there:
        first = await there.requests.publish(there.request())
        last, behind = there.bus.last, iter((True, True))

        async def lagging(subject: str) -> Any:
            return None if next(behind, False) else await last(subject)

        monkeypatch.setattr(there.bus, "last", lagging)
        with anyio.fail_after(60):
            assert await there.requests.publish(there.request()) == first
