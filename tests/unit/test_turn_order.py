"""An Action of a turn that was asked for ahead is stored after that of the turn before it, and never twice."""

from __future__ import annotations

from collections import defaultdict

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import Action, Observation, Subjects, encode
from fleetbus_workers.inference.turn_order import LONGEST_WAIT_SECONDS, OutOfTurn, TurnOrder, find_place
from fleetbus_workers.up.process_plans import build_stream_plan
from tests.support.small_deployment import build_configuration
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

S = Subjects("small")
SUBJECT = S.action("e0", "e")


def observed(turn: int, *, attempt: int = 1) -> Observation:
    return Observation(
        episode_id="e", attempt=attempt, turn=turn, policy="p", messages=(), tokens_left=9, environment_lane="e0",
        deadline_ns=1, ahead=1,
    )  # fmt: skip


def acted(turn: int, *, attempt: int = 1, sampled: bytes = b"\1\0\0\0") -> Action:
    return Action(episode_id="e", attempt=attempt, turn=turn, text="", sampled=sampled)


@pytest.mark.parametrize(
    ("stored", "place"),
    [
        (None, "early"),
        (acted(0), "early"),
        (acted(1), "due"),
        (acted(1, sampled=b""), "past"),
        (acted(2), "past"),
        (acted(3), "past"),
        (acted(9, attempt=1), "past"),
        (acted(1, attempt=3), "past"),
        (acted(0, attempt=3), "past"),
    ],
)
def test_the_place_of_a_turn_follows_from_the_last_action_on_its_subject(stored: Action | None, place: str) -> None:
    assert find_place(observed(2), stored) == place


def test_an_action_of_an_earlier_attempt_says_nothing_of_the_turn_before() -> None:
    assert find_place(observed(2, attempt=2), acted(7)) == "early"


async def declare(bus: MemoryBus) -> None:
    await bus.declare(build_stream_plan(build_configuration()))


async def test_it_waits_for_a_turn_in_work_however_long_that_takes_and_takes_its_sequence() -> None:
    async with MemoryServer().connect("small", worker="w") as bus:
        await declare(bus)
        busy = defaultdict(dict, {"e.1.1": {}})
        order, found = TurnOrder(bus, busy), []
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                found.append(await order.wait(observed(2), SUBJECT))

            group.start_soon(wait)
            await anyio.sleep(10 * LONGEST_WAIT_SECONDS)
            assert not found
            stored = await bus.publish(SUBJECT, encode(acted(1)))
            del busy["e.1.1"]
            order.end("e.1.1")
        assert found == [stored.sequence]


async def test_it_gives_up_when_the_turn_before_is_nowhere_in_work() -> None:
    async with MemoryServer().connect("small", worker="w") as bus:
        await declare(bus)
        began = anyio.current_time()
        with pytest.raises(OutOfTurn, match="turn 1 is not answered"):
            await TurnOrder(bus, {}).wait(observed(2), SUBJECT)
        assert LONGEST_WAIT_SECONDS <= anyio.current_time() - began <= LONGEST_WAIT_SECONDS + 1


async def test_it_takes_the_action_that_another_worker_stored_meanwhile() -> None:
    async with MemoryServer().connect("small", worker="w") as bus:
        await declare(bus)
        found = []
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                found.append(await TurnOrder(bus, {}).wait(observed(2), SUBJECT))

            group.start_soon(wait)
            await anyio.sleep(LONGEST_WAIT_SECONDS / 2)
            stored = await bus.publish(SUBJECT, encode(acted(1)))
        assert found == [stored.sequence]


async def test_the_log_that_is_past_a_turn_refuses_it() -> None:
    async with MemoryServer().connect("small", worker="w") as bus:
        await declare(bus)
        await bus.publish(SUBJECT, encode(acted(2)))
        with pytest.raises(OutOfTurn, match="past turn 2"):
            await TurnOrder(bus, {}).wait(observed(2), SUBJECT)


async def test_a_log_that_cannot_be_read_says_nothing_of_the_turn_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is away: a sample that is given up then would be lost for nothing."""
    async with MemoryServer().connect("small", worker="w") as bus:
        await declare(bus)
        is_away, last, found = True, MemoryBus.last, []

        async def read(self: MemoryBus, subject: str) -> StreamEntry | None:
            if is_away:
                raise RequestUnanswered("away")
            return await last(self, subject)

        monkeypatch.setattr(MemoryBus, "last", read)
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                found.append(await TurnOrder(bus, {}).wait(observed(2), SUBJECT))

            group.start_soon(wait)
            await anyio.sleep(3 * LONGEST_WAIT_SECONDS)
            stored = await bus.publish(SUBJECT, encode(acted(1)))
            is_away = False
        assert found == [stored.sequence]
