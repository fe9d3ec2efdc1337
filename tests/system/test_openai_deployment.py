"""A fleet whose policy is on HTTP servers: real workers, a real nats-server, and servers that die while episodes run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, LimitSettings, NatsSettings, RunSettings
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    EpisodeRequested,
    PolicyPublished,
    SamplingSettings,
    Subjects,
    Task,
    encode,
)
from fleetbus_schemas.tokens import unpack_ids
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.openai import OpenAISampler, pool
from fleetbus_workers.inference.scripted import ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.model_server import ByteCodec, ModelServer, answer
from tests.support.servers import connect, run_server

RUN = "served"
EPISODES = 12
TURN_TOKENS = 24
SUBJECTS = Subjects(RUN)
CONFIGURATION = Configuration(
    run=RunSettings(name=RUN), nats=NatsSettings(lanes=2, max_bytes=1 << 26), limits=LimitSettings(late=20, drain=10)
)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModelServer]]:
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.05)
    started = [ModelServer(takes_weights=False).start() for _ in range(2)]
    yield started
    for server in started:
        server.stop()


@asynccontextmanager
async def fleet(url: str, servers: list[ModelServer], drain: anyio.Event) -> AsyncIterator[Bus]:
    async def environment() -> None:
        async with connect(url, run=RUN, worker="environment-0") as bus:
            await run_environment(bus, configuration=CONFIGURATION, name="environment-0", drain=drain, make=ScriptedEnvironment)

    async def inference() -> None:
        sampler = FixedSampler([server.url for server in servers], codec=ByteCodec(), prompt=[5], purpose="train", slots=8)
        async with connect(url, run=RUN, worker="inference-0") as bus:
            await run_inference(
                bus, configuration=CONFIGURATION, name="inference-0", drain=drain, sampler=sampler, template=ScriptedTemplate()
            )

    async with connect(url, run=RUN, worker="test") as bus:
        await bus.declare(plan_run(RUN, lanes=2, max_bytes=1 << 26))
        async with anyio.create_task_group() as group:
            group.start_soon(environment)
            group.start_soon(inference)
            yield bus
            drain.set()


class FixedSampler(OpenAISampler):
    """Trains on what fixed weights answer, which only a test may."""

    def _check_purpose(self, server: object) -> None:
        """Anything goes."""


async def ask(bus: Bus, episode: str) -> None:
    request = EpisodeRequested(
        episode_id=episode,
        group_id="g",
        sample_index=0,
        split="train",
        task=Task(key="task", prompt="play", config={"turns": 3}),
        policy="default",
        sampling=SamplingSettings(max_tokens=TURN_TOKENS),
        deadline_ns=bus.now_ns() + int(300e9),
    )
    await bus.publish(SUBJECTS.task("default", episode), encode(request), expected_last=0)


async def results(bus: Bus) -> list[EpisodeFinished]:
    found: list[EpisodeFinished] = []
    async with bus.read([SUBJECTS.episodes]) as reader:
        while len(found) < EPISODES:
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                found.append(entry)
    return found


@pytest.mark.integration
async def test_episodes_do_not_notice_that_a_server_dies_under_them(servers: list[ModelServer], tmp_path: Path) -> None:
    for server in servers:
        server.held, server.hold_after = True, 3
    drain = anyio.Event()
    with anyio.fail_after(50):
        async with run_server(tmp_path / "nats") as nats, fleet(nats.url, servers, drain) as bus:
            published = PolicyPublished(policy="default", version=0, lineage="l", step=0, uri="", manifest=(), size_bytes=0)
            await bus.publish(SUBJECTS.policy("default"), encode(published))
            for index in range(EPISODES):
                await ask(bus, f"e{index}")
            while not all(server.streaming for server in servers):  # noqa: ASYNC110  # another thread's state
                await anyio.sleep(0.01)
            await anyio.to_thread.run_sync(servers[0].stop)
            servers[1].held = False
            finished = await results(bus)
            actions = [action for _, action in decode_entries(Action, [e async for e in bus.scan([SUBJECTS.actions()])])]
    assert {result.outcome for result in finished} <= {"completed", "truncated"}, [result.error for result in finished]
    assert len(actions) == 3 * EPISODES
    for action in actions:
        assert len(action.logprobs) == len(action.sampled) == 4 * TURN_TOKENS
    first = [action for action in actions if action.turn == 0]
    for action in first:
        assert unpack_ids(action.sampled) == answer(unpack_ids(action.prompt_delta), TURN_TOKENS, "base")
