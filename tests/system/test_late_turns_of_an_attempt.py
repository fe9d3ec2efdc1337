"""Turns that a killed environment worker had sent ahead are answered late, one after another, on the lane that its successor
has now: that one's observation goes round as often as it takes, and no episode is lost of it."""

from __future__ import annotations

from functools import partial

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EnvironmentSettings, NatsSettings
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.base import Ahead, Start, Step
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_turns_side_by_side import MOVED, Round, show

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

TURNS = 8
SAMPLED_SECONDS = 12.0
"""Longer than the checks of a late Action are apart."""


class Many(Round):
    """One turn, and seven beside it."""

    async def reset(self) -> Start:
        start = await super().reset()
        return Start(messages=start.messages, seat="a", ahead=tuple(map(tell, range(1, TURNS))))

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return msgspec.structs.replace(step, messages=show(self._played, "x"), seat=tell(self._played).seat, ahead=())


def tell(turn: int) -> Ahead:
    return Ahead(messages=show(turn, "x"), seat="abcdefgh"[turn % TURNS])


class Slow(ScriptedSampler):
    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.sleep(SAMPLED_SECONDS)
        return await super().generate(request)


@pytest.mark.parametrize("slots", [1, 2, 3])
async def test_late_answers_to_a_killed_workers_turns_lose_no_episode(slots: int) -> None:
    limits = msgspec.structs.replace(PATIENT, action=1000.0, episode=3000.0)
    settings = {"environment": EnvironmentSettings(slots=8), "nats": NatsSettings(lanes=1, max_bytes=1 << 28)}
    configuration = build_configuration(limits=limits, **settings)
    async with small_deployment(configuration) as fleet:
        first = fleet.environment("e1", make=partial(Many, lambda _: None))
        await fleet.heard(first, fleet.inference("i1", sampler=Slow(), slots=slots))
        await anyio.sleep(5)
        task = Task(key="task", prompt="play", config={"turns": TURNS})
        await fleet.request("e", task=task, sampling=MOVED, deadline_seconds=3000)
        await anyio.sleep(2)
        first.kill()
        await anyio.sleep(9)  # until its lane is free, which the next one takes
        await fleet.heard(fleet.environment("e2", make=partial(Many, lambda _: None)))
        result = await fleet.result("e")
        assert (result.outcome, result.attempts) == ("completed", 2), result.error
        await check_one_action_per_turn(fleet)
        assert not (await audit_run(fleet.bus, fleet.subjects)).findings
