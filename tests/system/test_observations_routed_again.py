"""An observation that was routed again while a worker had it in work: one Action, one sampling, and nothing comes back."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, observations_consumer, plan_run
from fleetbus.config.settings import Configuration, RunSettings
from schemas import Action, AttemptStarted, ChatMessage, Observation, PolicyPublished, Subjects, decode, encode
from workers.inference.base import Generation, GenerationRequest
from workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from workers.inference.worker import run_inference

RUN = "again"
SUBJECTS = Subjects(RUN)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Held(ScriptedSampler):
    """Answers nothing before it is let go, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.asked, self.let_go = anyio.Event(), anyio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.times += 1
        self.asked.set()
        await self.let_go.wait()
        return await super().generate(request)


async def test_what_was_routed_again_is_answered_once_and_acked_with_what_it_replaced() -> None:
    sampler, drain = Held(), anyio.Event()
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=1))
    async with server.connect(RUN, worker="test") as bus:
        claim = AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="e0")
        await bus.publish(SUBJECTS.episode("e"), encode(claim))
        version = PolicyPublished(
            policy="default", version=0, lineage="l1", step=0, uri="file:///none", manifest=(), size_bytes=0
        )
        await bus.publish(SUBJECTS.policy("default"), encode(version))
        observation = Observation(
            episode_id="e",
            attempt=1,
            turn=0,
            policy="default",
            messages=(ChatMessage(role="user", content="go"),),
            tokens_left=100,
            environment_lane="e0",
            deadline_ns=bus.now_ns() + 10**12,
        )
        subject, actions = SUBJECTS.observation("default", "any", "e"), SUBJECTS.action("e0", "e")
        with anyio.fail_after(600):
            async with anyio.create_task_group() as group, bus.read([actions]) as answers:

                async def work() -> None:
                    await run_inference(
                        bus,
                        configuration=Configuration(run=RunSettings(name=RUN)),
                        name="inference",
                        drain=drain,
                        sampler=sampler,
                        template=ScriptedTemplate(),
                    )

                group.start_soon(work)
                await bus.publish(subject, encode(observation))
                await sampler.asked.wait()
                again = await bus.publish(subject, encode(msgspec.structs.replace(observation, hop=1)))
                await anyio.sleep(1)  # of virtual time: it has been delivered then
                sampler.let_go.set()
                assert decode(Action, (await answers.receive()).payload).hop == 0
                await anyio.sleep(3 * OBSERVATION_LEASE_SECONDS)
                floors = {floor.name: floor.ack_floor for floor in await bus.consumer_floors()}
                drain.set()
    assert floors[observations_consumer("default", "any")] == again.sequence
    assert sampler.times == 1
