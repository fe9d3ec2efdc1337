"""One inference worker without a model on a bus of a test, what it is asked, and a sampler that answers when it is let go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import AttemptStarted, ChatMessage, Observation, PolicyPublished, Subjects, encode
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference


class HeldSampler(ScriptedSampler):
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


@asynccontextmanager
async def inference_worker(bus: Bus, run: str, sampler: Sampler) -> AsyncIterator[None]:
    """A worker of ``run`` on this bus, drained at the end of the block."""
    drain = anyio.Event()
    configuration, template = Configuration(run=RunSettings(name=run)), ScriptedTemplate()
    work = partial(
        run_inference, configuration=configuration, name="inference", drain=drain, sampler=sampler, template=template
    )
    async with anyio.create_task_group() as group:
        group.start_soon(work, bus)
        yield
        drain.set()


async def begin_episode(bus: Bus, run: str) -> None:
    """Publish a version of the policy, and the claim of the episode ``e`` by the environment worker ``w``."""
    subjects = Subjects(run)
    claim = AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="e0")
    await bus.publish(subjects.episode("e"), encode(claim))
    version = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="file:///none", manifest=(), size_bytes=0)
    await bus.publish(subjects.policy("default"), encode(version))


def make_first_observation(bus: Bus, *, attempt: int = 1) -> Observation:
    """Turn 0 of the episode ``e``, whose Actions go to the environment lane ``e0``."""
    return Observation(
        episode_id="e",
        attempt=attempt,
        turn=0,
        policy="default",
        messages=(ChatMessage(role="user", content="go"),),
        tokens_left=100,
        environment_lane="e0",
        deadline_ns=bus.now_ns() + 10**12,
    )
