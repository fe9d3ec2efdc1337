"""A server whose clock is set past the deadlines of episodes ends none that is being played: its observations are answered."""

from __future__ import annotations

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Action, Subjects, decode, encode
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.single_engine import begin_episode, inference_worker, make_first_observation
from tests.support.virtual_time import virtual_time

RUN = "set"
SUBJECTS = Subjects(RUN)
SET_SECONDS = 5 * 3600.0

anyio_backend = virtual_time


async def test_who_plays_on_after_the_servers_clock_was_set_past_the_deadline_is_answered() -> None:
    """Its environment worker counts the time on its own clock; unanswered it ended as poison, three reroutes later."""
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=1))
    async with server.connect(RUN, worker="test") as bus:
        await begin_episode(bus, RUN)
        observation = make_first_observation(bus)
        with anyio.fail_after(60):
            async with bus.read([SUBJECTS.action("e0", "e")]) as answers, inference_worker(bus, RUN, ScriptedSampler()):
                server.step_clock(SET_SECONDS)
                await bus.publish(SUBJECTS.observation("default", "any", "e"), encode(observation))
                assert decode(Action, (await answers.receive()).payload).error_class == ""
