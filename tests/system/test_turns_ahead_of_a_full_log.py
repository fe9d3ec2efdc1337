"""An answer that is there is played, though the log takes no turns that are sent ahead of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.bus.base import PublishAck
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.config.settings import EnvironmentSettings
from fleetbus.errors import LogFull
from fleetbus_schemas import Observation, Task, decode
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_turns_side_by_side import MOVED, ROUNDS, SAMPLED_SECONDS, TURNS, Round, Slow

pytestmark = pytest.mark.integration

anyio_backend = virtual_time


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_answer_does_not_wait_for_turns_ahead_that_the_log_does_not_take(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a turn is asked for once it is next, also where it was stored and the answer to that was lost. All of them waited
    until the limit of an answer, which ended the episode."""
    publish = MemoryBus.publish

    async def store(bus: MemoryBus, subject: str, payload: bytes, **options: Any) -> PublishAck:
        is_refused = ".obs." in subject and decode(Observation, payload, subject=subject).ahead > 0
        if is_stored or not is_refused:
            published = await publish(bus, subject, payload, **options)
        if is_refused:
            raise LogFull(f"{subject}: maximum bytes exceeded")
        return published

    monkeypatch.setattr(MemoryBus, "publish", store)
    limits = msgspec.structs.replace(PATIENT, action=20.0)
    async with small_deployment(build_configuration(limits=limits, environment=EnvironmentSettings(slots=8))) as fleet:
        await fleet.heard(fleet.environment("e1", make=partial(Round, lambda _: None)), fleet.inference("i1", sampler=Slow()))
        await anyio.sleep(5)
        began = anyio.current_time()
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        result = await fleet.result("e")
        seconds = anyio.current_time() - began
        await check_one_action_per_turn(fleet)
        observations = await fleet.observations()
    assert (result.outcome, result.turns) == ("completed", TURNS), result.error
    assert seconds < TURNS * (SAMPLED_SECONDS + 0.1) + 2.1 * TURNS
    sent_again = len(observations) - TURNS
    assert sent_again == 0 if is_stored else sent_again <= ROUNDS
