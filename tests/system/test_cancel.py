"""Cancelling episodes wherever they are - running, waiting, with a dead worker, over - and draining workers by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, LimitSettings, NatsSettings, RunSettings
from fleetbus.delivery.cancel import CancelResult, cancel_episode, drain_worker
from fleetbus.log.episodes import read_episode_state
from fleetbus_schemas import AttemptStarted, EpisodeFinished, EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.episode.attempts import Attempts
from fleetbus_workers.environment.worker import run_environment
from tests.support.connections import Connect, connections_to

S = Subjects("run")


@pytest.fixture(params=["memory", "nats"])
async def connections(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    async with connections_to(request.param, "run", tmp_path) as connect:
        yield connect


@asynccontextmanager
async def ready(connections: Connect) -> AsyncIterator[Bus]:
    with anyio.fail_after(50):
        async with connections("test") as bus:
            await bus.declare(plan_run("run", lanes=2))
        async with connections("operator") as bus:
            yield bus


async def request(bus: Bus, episode: str) -> None:
    message = EpisodeRequested(
        episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default",
        deadline_ns=bus.now_ns() + 60 * 10**9,
    )  # fmt: skip
    await bus.publish(S.task("default", episode), encode(message), expected_last=0)


async def play(
    connections: Connect,
    drain: anyio.Event,
    name: str = "environment-0",
    make: Callable[[], ScriptedEnvironment] = ScriptedEnvironment,
) -> None:
    """An environment worker without any inference worker: whatever it plays waits for an action for ever."""
    configuration = Configuration(
        run=RunSettings(name="run"), nats=NatsSettings(lanes=2), limits=LimitSettings(late=0.2, drain=0.1)
    )
    async with connections(name) as bus:
        await run_environment(bus, configuration=configuration, name=name, drain=drain, make=make)


async def until(bus: Bus, subject: str) -> None:
    """Wait for the next entry on a subject."""
    async with bus.read([subject]) as reader:
        await reader.receive()


async def cancel(bus: Bus, episode: str) -> CancelResult:
    return await cancel_episode(bus, S, episode, author="operator", close_seconds=5)


async def result(bus: Bus, episode: str) -> EpisodeFinished:
    episode_state = await read_episode_state(bus, S, episode)
    assert episode_state.result is not None
    return episode_state.result


async def test_a_running_episode_is_ended_by_the_worker_that_runs_it_and_no_other_is(connections: Connect) -> None:
    drain = anyio.Event()
    async with ready(connections) as bus, anyio.create_task_group() as group:
        group.start_soon(play, connections, drain)
        for episode in ("a", "b"):
            await request(bus, episode)
            await until(bus, S.observation("default", "any", episode))
        done = await cancel(bus, "a")
        assert (done.state, done.worker, done.outcome) == ("cancelled", "environment-0", "cancelled")
        stored = await result(bus, "a")
        assert (stored.outcome, stored.worker, stored.reward) == ("cancelled", "environment-0", None)
        assert stored.error == "asked for by operator"
        assert (await read_episode_state(bus, S, "b")).result is None
        drain.set()


class ClosesLater(ScriptedEnvironment):
    closing, let_go = anyio.Event(), anyio.Event()

    async def close(self) -> None:
        self.closing.set()
        await self.let_go.wait()


async def test_an_order_that_comes_while_a_superseded_attempt_closes_is_followed(
    connections: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has promised it, and who ordered it writes nothing."""
    ClosesLater.closing, ClosesLater.let_go = anyio.Event(), anyio.Event()
    drain, cancel_here = anyio.Event(), Attempts.cancel

    def cancel_and_let_go(attempts: Attempts, episodes: Sequence[str], author: str) -> list[str]:
        ClosesLater.let_go.set()
        return cancel_here(attempts, episodes, author)

    monkeypatch.setattr(Attempts, "cancel", cancel_and_let_go)

    async with ready(connections) as bus, anyio.create_task_group() as group:
        group.start_soon(play, connections, drain, "environment-0", ClosesLater)
        await request(bus, "a")
        await until(bus, S.observation("default", "any", "a"))
        claim = AttemptStarted(episode_id="a", attempt=2, worker="environment-0", nonce="another", lane="e0")
        await bus.publish(S.episode("a"), encode(claim))
        await ClosesLater.closing.wait()
        done = await cancel(bus, "a")
        assert (done.state, done.worker) == ("cancelled", "environment-0")
        assert (await result(bus, "a")).attempts == 2
        drain.set()


async def test_an_episode_that_waits_is_closed_and_whoever_gets_its_request_later_plays_nothing(connections: Connect) -> None:
    drain = anyio.Event()
    async with ready(connections) as bus, anyio.create_task_group() as group:
        await request(bus, "a")
        done = await cancel(bus, "a")
        assert (done.state, done.worker) == ("cancelled", "operator")
        group.start_soon(play, connections, drain)
        async with connections("recorder") as recorder:
            floor = 0
            while floor == 0:  # until the worker has acked the request
                floors = {each.filter: each.ack_floor for each in await recorder.ack_floors()}
                floor = floors[S.tasks("default")]
        episode_state = await read_episode_state(bus, S, "a")
        assert (episode_state.claims, (await result(bus, "a")).outcome) == ((), "cancelled")
        drain.set()


async def test_an_episode_of_a_dead_worker_is_closed_in_the_log(connections: Connect) -> None:
    async with ready(connections) as bus:
        await request(bus, "a")
        claim = AttemptStarted(episode_id="a", attempt=1, worker="dead", nonce="n", lane="e0")
        await bus.publish(S.episode("a"), encode(claim))
        assert await cancel(bus, "a") == CancelResult(episode_id="a", state="cancelled", worker="operator", outcome="cancelled")
        assert (await result(bus, "a")).attempts == 1


class Meanwhile:
    """A bus on which somebody else's claim comes in just before the first publish."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._claimed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Any:
        if not self._claimed:
            self._claimed = True
            claim = AttemptStarted(episode_id="a", attempt=1, worker="dead", nonce="n", lane="e0")
            await self._bus.publish(S.episode("a"), encode(claim))
        return await self._bus.publish(subject, payload, **options)


async def test_a_claim_that_comes_in_between_is_cancelled_as_well(connections: Connect) -> None:
    async with ready(connections) as bus:
        await request(bus, "a")
        done = await cancel(Meanwhile(bus), "a")
        assert done.state == "cancelled"
        episode_state = await read_episode_state(bus, S, "a")
        assert episode_state.attempts == 1
        assert episode_state.result is not None and episode_state.result.attempt == 1


async def test_cancelling_again_says_that_it_is_over_and_changes_nothing(connections: Connect) -> None:
    async with ready(connections) as bus:
        await request(bus, "a")
        await cancel(bus, "a")
        before = (await bus.log_state()).last_sequence
        assert await cancel(bus, "a") == CancelResult(episode_id="a", state="over", outcome="cancelled")
        assert (await cancel(bus, "nobody")).state == "unknown"
        assert (await bus.log_state()).last_sequence == before


async def test_a_worker_drains_when_it_is_told_to_by_name(connections: Connect) -> None:
    async with ready(connections) as bus:
        async with anyio.create_task_group() as group:
            group.start_soon(play, connections, anyio.Event())
            await until(bus, S.life("environment", "environment-0"))
            role = None
            while role is None:  # it is there, and may not serve yet
                role = await drain_worker(bus, S, "environment-0")
        assert role == "environment"
        assert await drain_worker(bus, S, "environment-0") is None
