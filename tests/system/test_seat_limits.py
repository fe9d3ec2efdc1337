"""A seat at its limit of turns or tokens: the episode ends there with its grade, of whatever policy, after any takeover."""

from __future__ import annotations

import pytest

from fleetbus.config.settings import EpisodeSettings, RunSettings
from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_other_policies_fail import Speechless
from tests.system.test_seats_taken_over import OTHERS, Table
from tests.system.test_segments_taken_over import Killer, Trained, play

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

LIMITED = [
    ("", "a.max_turns=2", "seat_turns", "the seat a has had 2 of 2 turns", 3),
    ("", "c.max_turns=1\na.max_turns=9", "seat_turns", "the seat c has had 1 of 1 turns", 7),
    ("", "a.max_tokens=26", "seat_tokens", "the seat a has used 26 of its 26 tokens", 3),
    ("", "a.max_tokens=28", "seat_tokens", "the seat a has used 26 of its 28 tokens", 3),
    ("", "a.max_tokens=43", "seat_tokens", "the seat a has used 43 of its 43 tokens", 6),
    (OTHERS, "b.max_turns=1", "seat_turns", "the seat b has had 1 of 1 turns", 5),
    (OTHERS, "b.max_tokens=17", "seat_tokens", "the seat b has used 14 of its 17 tokens", 5),
]
"""Seats of other policies, limits, error class, note, and the turns that are played before."""


def describe(result: EpisodeFinished) -> tuple[object, ...]:
    return result.outcome, result.error_class, result.note, result.turns, result.reward, result.seats


@pytest.mark.parametrize(("seats", "limits", "error_class", "note", "turns"), LIMITED)
async def test_an_episode_ends_truncated_and_graded_when_a_seat_would_go_beyond_its_limit(
    seats: str, limits: str, error_class: str, note: str, turns: int
) -> None:
    result, _ = await play(make=Table, seats=seats, seat_limits=limits)
    assert describe(result)[:2] == ("truncated", error_class), (result.error, result.turns)
    assert result.note.startswith(note)
    assert (result.turns, result.reward) == (turns, 0.5)
    assert {seat.name: seat.reward for seat in result.seats}["a"] == 1.0


@pytest.mark.parametrize(("seats", "limits"), [case[:2] for case in LIMITED[3:]])
async def test_a_kill_at_any_point_changes_nothing_of_how_a_seat_reaches_its_limit(seats: str, limits: str) -> None:
    result, expected = await play(make=Table, seats=seats, seat_limits=limits)
    points = [("environment", ("stepped", step)) for step in range(1, result.turns + 1)]
    points += [(role, ("asked", turn)) for role in ("environment", "inference") for turn in range(result.turns)]
    for role, point in points[::2]:
        killer = Killer(role, point)
        disturbed, trained = await play(killer, make=Table, seats=seats, seat_limits=limits)
        assert killer.killed.startswith(role), (role, point)
        assert describe(disturbed) == describe(result), (role, point, disturbed.error)
        assert trained == expected, (role, point)


async def test_limits_that_no_seat_reaches_change_nothing() -> None:
    def shown(played: tuple[EpisodeFinished, Trained]) -> tuple[object, ...]:
        return *describe(played[0]), played[1]

    limits = "a.max_turns=4\nb.max_tokens=9000\nnobody.max_turns=1"
    assert shown(await play(make=Table, seat_limits=limits)) == shown(await play(make=Table))


async def play_with(sampler: ScriptedSampler, limits: str) -> EpisodeFinished:
    """An episode in which ``sampler`` plays the other policy's seat."""
    episode = EpisodeSettings(seat_limits=limits)
    configuration = build_configuration(run=RunSettings(name=RUN, seats=OTHERS), episode=episode)
    async with small_deployment(configuration) as fleet:
        members = [fleet.environment("environment", make=Table), fleet.inference("inference")]
        members.append(fleet.inference("inference-other", sampler=sampler, policy="simulator"))
        await fleet.heard(*members)
        await fleet.request("e")
        return await fleet.result("e")


async def test_a_seats_limit_excuses_no_engine_that_has_no_room_for_an_answer() -> None:
    result = await play_with(Speechless(), "b.max_tokens=9000")
    assert (result.outcome, result.error_class, result.reward) == ("lost", "seat_without_room", None)


async def test_a_first_prompt_beyond_its_seats_limit_is_graded_by_nothing_and_named() -> None:
    result = await play_with(ScriptedSampler(), "a.max_tokens=1")
    assert (result.outcome, result.error_class) == ("verifier_unknown", "prompt_too_long")
    assert "the seat a has used 0 of its 1 tokens, too many for its turn 1 (episode.seat_limits)" in result.error
