"""An observation that was routed again while a worker had it in work: one Action, one sampling, and nothing comes back."""

from __future__ import annotations

import anyio
import msgspec

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, observations_consumer, plan_run
from fleetbus_schemas import Action, Subjects, decode, encode
from tests.support.single_engine import HeldSampler, begin_episode, inference_worker, make_first_observation
from tests.support.virtual_time import virtual_time

RUN = "again"
SUBJECTS = Subjects(RUN)

anyio_backend = virtual_time


async def test_what_was_routed_again_is_answered_once_and_acked_with_what_it_replaced() -> None:
    sampler = HeldSampler()
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=1))
    async with server.connect(RUN, worker="test") as bus:
        await begin_episode(bus, RUN)
        observation = make_first_observation(bus)
        subject, actions = SUBJECTS.observation("default", "any", "e"), SUBJECTS.action("e0", "e")
        with anyio.fail_after(600):
            async with bus.read([actions]) as answers, inference_worker(bus, RUN, sampler):
                await bus.publish(subject, encode(observation))
                await sampler.asked.wait()
                again = await bus.publish(subject, encode(msgspec.structs.replace(observation, hop=1)))
                await anyio.sleep(1)  # of virtual time: it has been delivered then
                sampler.let_go.set()
                assert decode(Action, (await answers.receive()).payload).hop == 0
                await anyio.sleep(3 * OBSERVATION_LEASE_SECONDS)
                floors = {floor.name: floor.ack_floor for floor in await bus.ack_floors()}
    assert floors[observations_consumer("default", "any")] == again.sequence
    assert sampler.times == 1
