"""Turns that wait for the one before them keep no slot from it: a fleet full of them goes on when a worker is killed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EnvironmentSettings
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import Task
from fleetbus_workers.inference.waiting_turns import WaitingTurns
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_turns_side_by_side import MOVED, SAMPLED_SECONDS, TURNS, Round, Slow

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

EPISODES = 6
LONG = msgspec.structs.replace(PATIENT, action=1000.0, episode=3000.0)


async def measure(*, turns_at_once: int, slots: int) -> float:
    """Seconds until all episodes are completed on two inference workers, of which one is killed amid the first turns."""
    environment = EnvironmentSettings(slots=EPISODES, turns_at_once=turns_at_once)
    async with small_deployment(build_configuration(limits=LONG, environment=environment)) as fleet:
        members = [fleet.environment("e1", make=partial(Round, lambda _: None))]
        members += [fleet.inference(name, sampler=Slow(), slots=slots) for name in ("i1", "i2")]
        await fleet.heard(*members)
        await anyio.sleep(5)
        began = anyio.current_time()
        for number in range(EPISODES):
            await fleet.request(f"e{number}", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        await anyio.sleep(SAMPLED_SECONDS / 2)
        fleet.members["i1"].kill()
        for number in range(EPISODES):
            result = await fleet.result(f"e{number}")
            assert result.outcome == "completed", result.error
        seconds = anyio.current_time() - began
        await check_one_action_per_turn(fleet)
        assert not (await audit_run(fleet.bus, fleet.subjects)).findings
    return seconds


@pytest.mark.parametrize("slots", [1, 2, 8])
async def test_after_a_kill_turns_side_by_side_go_on_as_soon_as_turns_one_after_another(slots: int) -> None:
    """They stood still for a minute per turn while those that waited kept all slots of the other worker."""
    one_by_one = await measure(turns_at_once=1, slots=slots)
    assert await measure(turns_at_once=8, slots=slots) < one_by_one + 15


async def run_turns(turns: WaitingTurns, work: Callable[[str], Awaitable[None]], names: list[str]) -> list[str]:
    """The turns whose slots were free within a second."""
    freed: list[str] = []

    async def start(name: str) -> None:
        await turns.start(name, work, name)
        freed.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(turns.run)
        for name in names:
            group.start_soon(start, name)
            await anyio.sleep(0.1)
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    return freed


async def test_a_turn_that_waits_leaves_its_slot_unless_many_wait() -> None:
    turns = WaitingTurns(most=2)

    async def wait(name: str) -> None:
        turns.leave_slot(name)
        await anyio.sleep_forever()

    assert await run_turns(turns, wait, ["a", "b", "c"]) == ["a", "b"]


async def test_a_turn_that_was_not_started_ahead_keeps_its_slot() -> None:
    assert not WaitingTurns().leave_slot("a")


async def test_a_failure_of_the_bus_ends_a_turn_and_no_other() -> None:
    turns, ended = WaitingTurns(), []

    async def fail(name: str) -> None:
        if name == "a":
            raise RequestUnanswered("away")
        await anyio.sleep(0.5)
        ended.append(name)

    assert await run_turns(turns, fail, ["a", "b"]) == ["a", "b"]
    assert ended == ["b"]


async def test_a_drained_worker_waits_for_turns_outside_its_slots() -> None:
    turns, ended = WaitingTurns(), []

    async def wait(name: str) -> None:
        turns.leave_slot(name)
        await anyio.sleep(5)
        ended.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(turns.run)
        await turns.start("a", wait, "a")
        assert not ended
        await turns.wait_until_idle()
        assert ended == ["a"]
        group.cancel_scope.cancel()
