"""Workers killed in the midst of an episode with seats: at every point of it, each seat has the turns, the tokens and the
reward of an episode that nobody disturbed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus_schemas import Action, ChatMessage, ContextChange, EpisodeFinished
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.inference.scripted import VOCABULARY
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN
from tests.support.virtual_time import virtual_time
from tests.system.test_segments_taken_over import TURNS, Forest, Killer, Rendering, count_trained, play

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

ACTED = ("a", "b", "a", "a", "c", "b", "a", "c", "b")
"""By turn; a seat that acts twice in a row has its context cut."""

REWARDS = {"a": 1.0, "b": -0.5, "c": None}


class Table(Forest):
    """Three seats, of which one is not trained."""

    def __init__(self, stepped: Callable[[int], None] = lambda _: None, *, acted: tuple[str, ...] = ACTED) -> None:
        super().__init__(stepped, changes={})
        self._acted = acted

    async def reset(self) -> Start:
        return Start(messages=(await super().reset()).messages, seat=self._acted[0])

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        if step.terminated:
            return step
        before, seat = self._acted[self._played - 1 : self._played + 1]
        change = ContextChange(keep_turns=1) if seat == before else None
        return Step(messages=(ChatMessage(role="user", content=f"turn {self._played}"),), seat=seat, context=change)

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5, seats=dict(REWARDS))


class Undecided(Table):
    """Gives a turn to somebody else than the attempt before did."""

    opened = 0

    def __init__(self, stepped: Callable[[int], None]) -> None:
        Undecided.opened += 1
        super().__init__(stepped, acted=ACTED if Undecided.opened == 1 else (*ACTED[:2], "b", *ACTED[3:]))


async def test_a_kill_at_any_point_leaves_each_seat_its_turns_tokens_and_reward() -> None:
    result, expected = await play(make=Table)
    assert [(seat.name, seat.turns, seat.reward) for seat in result.seats] == [
        ("a", (0, 2, 3, 6), 1.0),
        ("b", (1, 5, 8), -0.5),
        ("c", (4, 7), None),
    ]
    assert [each.turn for each in result.untrained] == [4, 7]
    assert count_trained(expected) == 8 * (TURNS - 2), "each sampled token of a seat with a reward is trained once"
    points = [("environment", ("stepped", step)) for step in range(1, TURNS)]
    points += [(role, ("asked", turn)) for role in ("environment", "inference") for turn in range(TURNS)]
    for role, point in points:
        killer = Killer(role, point)
        disturbed, trained = await play(killer, make=Table)
        assert killer.killed.startswith(role), (role, point)
        assert (disturbed.outcome, disturbed.seats) == ("completed", result.seats), (role, point, disturbed.error)
        assert trained == expected, (role, point)


OTHERS = "b=simulator"


def describe(result: EpisodeFinished) -> list[tuple[str, tuple[int, ...], float | None]]:
    return [(seat.name, seat.turns, seat.reward) for seat in result.seats]


async def test_a_seat_of_another_policy_is_played_by_its_workers_and_never_trained() -> None:
    result, trained = await play(make=Table, seats=OTHERS)
    assert describe(result) == [("a", (0, 2, 3, 6), 1.0), ("b", (1, 5, 8), None), ("c", (4, 7), None)]
    assert [seat.reason for seat in result.seats][1] == "the policy simulator plays it, which is not trained here"
    assert [each.turn for each in result.untrained] == [1, 4, 5, 7, 8]
    assert count_trained(trained) == 8 * 4
    assert all(max(ids) < VOCABULARY for _, ids, _, _ in trained), "no sequence holds tokens of the other model"


async def test_a_kill_leaves_the_seats_of_two_policies_their_turns() -> None:
    result, expected = await play(make=Table, seats=OTHERS)
    points = [("environment", ("stepped", step)) for step in range(1, TURNS)]
    points += [(role, ("asked", turn)) for role in ("environment", "inference") for turn in range(TURNS)]
    for role, point in points[::3]:
        killer = Killer(role, point)
        disturbed, trained = await play(killer, make=Table, seats=OTHERS)
        assert killer.killed.startswith(role), (role, point)
        assert (disturbed.outcome, disturbed.seats) == ("completed", result.seats), (role, point, disturbed.error)
        assert trained == expected, (role, point)


@pytest.mark.parametrize("others", ["", OTHERS])
async def test_a_kill_leaves_each_seat_its_conversation_where_the_template_renders_it_anew(others: str) -> None:
    make = partial(Table, acted=("a", "b", "a", "b", "a", "b", "a", "b", "a"))
    result, expected = await play(make=make, template=Rendering(), seats=others)
    assert (result.outcome, result.error) == ("completed", "")
    assert count_trained(expected) == 8 * (5 if others else TURNS)
    for role in ("environment", "inference"):
        killer = Killer(role, ("asked", 4))
        disturbed, trained = await play(killer, make=make, template=Rendering(), seats=others)
        assert killer.killed.startswith(role)
        assert (disturbed.outcome, disturbed.seats, trained) == ("completed", result.seats, expected), (role, disturbed.error)


async def test_a_takeover_that_gives_a_turn_to_another_seat_than_was_recorded_has_diverged() -> None:
    Undecided.opened = 0
    result, _ = await play(Killer("environment", ("asked", 7)), make=Undecided)
    assert (result.outcome, result.error_class) == ("lost", "diverged")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("role", ["environment", "inference"])
async def test_a_kill_on_a_real_server_leaves_each_seat_its_own(role: str, tmp_path: Path) -> None:
    undisturbed, expected = await play(make=Table)
    async with run_server(tmp_path) as server:
        killer = Killer(role, ("asked", 5))
        with anyio.fail_after(50):
            connected = partial(connect, server.url, run=RUN)
            result, trained = await play(killer, connected=lambda name: connected(worker=name), make=Table)
    assert killer.killed.startswith(role)
    assert (result.outcome, result.seats, trained) == ("completed", undisturbed.seats, expected)
