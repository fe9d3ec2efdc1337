"""A server whose clock is set past the deadlines of episodes ends none that is being played: its observations are answered,
and none stays in work for ever."""

from __future__ import annotations

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import observations_consumer, plan_run
from fleetbus_schemas import Action, Subjects, decode, encode
from fleetbus_workers.inference.observation_handler import LONGEST_ANSWER_SECONDS
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.single_engine import HeldSampler, begin_episode, inference_worker, make_first_observation
from tests.support.virtual_time import virtual_time

RUN = "set"
SUBJECTS = Subjects(RUN)
SET_SECONDS = 5 * 3600.0
CONSUMERS = [observations_consumer("default", "any")]

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


async def test_an_engine_that_never_answers_such_an_observation_does_not_keep_it_for_ever() -> None:
    """Not acked, it kept everything that came after it in the log, which was full some time."""
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=1))
    async with server.connect(RUN, worker="test") as bus:
        await begin_episode(bus, RUN)
        observation, sampler = make_first_observation(bus), HeldSampler()
        with anyio.fail_after(4 * LONGEST_ANSWER_SECONDS):
            async with inference_worker(bus, RUN, sampler):
                server.step_clock(SET_SECONDS)
                await bus.publish(SUBJECTS.observation("default", "any", "e"), encode(observation))
                await sampler.asked.wait()
                await anyio.sleep(LONGEST_ANSWER_SECONDS + 60)
                assert (await bus.log_state(CONSUMERS)).unacked == 0
