"""Limits of single seats: as they are set, counted and told, and what the audit holds results against."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from fleetbus.config.check import check_configuration
from fleetbus.config.fields import list_settings
from fleetbus.config.load import load_configuration
from fleetbus.config.seat_limits import parse_seat_limits
from fleetbus.config.settings import Configuration, EpisodeSettings, LimitSettings
from fleetbus.errors import UserError
from fleetbus.interchange.eval_samples import build_sample
from fleetbus.recording.episodes import read_transcript
from fleetbus_schemas import EpisodeFinished, Observation, SeatLimit, SeatPolicy, Task
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.check.episode import play_episode
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats
from fleetbus_workers.inference.turn_rules import find_lack_of_room
from fleetbus_workers.up.progress_guard import ProgressGuard
from tests.support.forged_seats import TOKENS, play_game
from tests.support.log_builder import PROMPT, audit_log, kinds, read_entries, start_log
from tests.unit.test_check_of_seats import Duo
from tests.unit.test_seats import SHOWN

FIRST = SeatLimit(seat="first", max_turns=2, max_tokens=40)
SECOND = SeatPolicy(seat="second", policy="simulator")


def test_a_line_limits_the_turns_or_the_tokens_of_one_seat() -> None:
    given = ["first.max_turns=2", "second.max_turns=3", "first.max_tokens=40"]
    loaded = load_configuration(flags={"episode.seat_limits": given})
    assert parse_seat_limits(loaded.configuration.episode.seat_limits) == (FIRST, SeatLimit(seat="second", max_turns=3))
    assert parse_seat_limits("") == ()
    assert next(each for each in list_settings() if each.name == "episode.seat_limits").is_repeatable


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("first=2", "write SEAT.max_turns=N or SEAT.max_tokens=N"),
        ("first.max_turns=0", "with N from 1"),
        ("first.turns=1", "write SEAT.max_turns=N"),
        ("a b.max_turns=1", "a seat is 1 to 128 letters"),
        ("first.max_turns=1\nfirst.max_turns=2", "two limits max_turns; give it one"),
        ("first.max_turns=6", "6 turns, and all seats have episode.max_turns = 5 together: raise that"),
    ],
)
def test_limits_that_cannot_be_are_refused_in_one_line(limits: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        check_configuration(Configuration(episode=EpisodeSettings(seat_limits=limits)))
    assert "\n" not in str(refused.value)


def test_turns_and_tokens_are_those_of_one_seat() -> None:
    seats = EpisodeSeats("first", {"second": SECOND}, {"first": FIRST, "second": SeatLimit(seat="second", max_tokens=10)})
    assert (seats.is_at_limit(), seats.limit_tokens(99), seats.limit_tokens(30)) == (False, 40, 30)
    assert seats.describe_limit(30) == ("", ""), "the episode has less left than the seat"
    seats.append(0, 0, 25)
    seats.take(Step(messages=SHOWN, seat="second"))
    assert (seats.is_at_limit(), seats.limit_tokens(99), seats.count_turns(1, 9)) == (False, 10, (1, 9))
    seats.append(1, 1, 12)
    used = "the seat second has used 12 of its 10 tokens, too many for its turn 2 (episode.seat_limits)"
    assert (seats.is_at_limit(), seats.describe_limit(99)) == (True, ("seat_tokens", used))
    assert seats.describe_limit(0) == ("", ""), "the episode's own tokens are used up"
    seats.take(Step(seat="first"))
    assert (seats.is_at_limit(), seats.limit_tokens(99), seats.count_turns(2, 9)) == (False, 15, (1, 2))
    seats.append(2, 0, 5)
    assert (seats.is_at_limit(), seats.other_tokens) == (True, 12)
    assert seats.describe_limit(99) == ("seat_turns", "the seat first has had 2 of 2 turns (episode.seat_limits)")
    assert (UNSEATED.is_at_limit(), UNSEATED.limit_tokens(7), UNSEATED.count_turns(1, 9)) == (False, 7, (1, 9))


async def test_results_within_their_limits_balance() -> None:
    within = (SeatLimit(seat="first", max_turns=2, max_tokens=TOKENS + PROMPT + 1), SeatLimit(seat="second", max_turns=1))
    for error_class in ("seat_turns", "seat_tokens"):
        log_builder = start_log()
        play_game(log_builder, limits=within, outcome="truncated", error_class=error_class)
        assert kinds(await audit_log(log_builder)) == {}


def test_a_sample_of_an_inspect_log_has_the_limit_of_the_seat_that_reached_it() -> None:
    log_builder = start_log()
    limits, note = (SeatLimit(seat="second", max_turns=7), FIRST), "the seat first has had 2 of 2 turns"
    play_game(log_builder, limits=limits, outcome="truncated", error_class="seat_turns", note=note)
    sample = build_sample(read_transcript(read_entries(log_builder)), "run", name="a", epoch=1, model="m")
    assert sample["limit"] == {"type": "turn", "limit": 2}


@pytest.mark.parametrize(
    ("limit", "ending"),
    [
        ("proposer.max_turns=1", "truncated: the seat proposer has had 1 of 1 turns (episode.seat_limits)"),
        ("solvr.max_turns=1", ""),
    ],
)
async def test_a_check_ends_at_a_seats_limit_and_names_one_of_a_seat_that_did_not_act(limit: str, ending: str) -> None:
    configuration = Configuration(episode=EpisodeSettings(seat_limits=limit))
    episode = await play_episode(Duo, Task(key="a"), lambda *_: "answer", configuration, turns=9)
    assert episode.ending == (ending or "terminated")
    said = [problem.text for problem in episode.problems if "limits the seat solvr, and here it did not act" in problem.text]
    assert len(said) == (not ending)


def test_up_says_that_a_seats_tokens_leave_no_room_for_its_first_turns() -> None:
    guard = ProgressGuard(LimitSettings(), 0.0)
    result = EpisodeFinished(
        episode_id="e",
        group_id="g",
        attempt=1,
        outcome="truncated",
        worker="w",
        error_class="seat_tokens",
        note="the seat second has used 0 of its 9 tokens",
        reward=0.0,
        turns=1,
    )
    for number in range(9):
        guard.apply(replace(result, episode_id=f"e{number}"), 0.0)
    (line,) = guard.take_lines(0.0)
    assert "0 of its 9 tokens; raise the seat's max_tokens" in line


@pytest.mark.parametrize("forged", [{"seat": ""}, {"seat": "a", "max_turns": 0}, {"seat": "a", "max_tokens": -1}])
def test_a_request_with_a_limit_that_nothing_could_keep_is_not_read(forged: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(forged, SeatLimit)


@pytest.mark.parametrize(
    ("trained", "left", "tokens", "found"),
    [(False, 99, 100, "seat_without_room"), (False, 99, 50, ""), (True, 99, 100, ""), (False, 20, 100, "")],
    ids=["the model has no room", "it has", "a trained one ends its episode", "its seat has no tokens left either"],
)
def test_a_model_without_room_is_told_from_a_seat_at_its_limit(trained: bool, left: int, tokens: int, found: str) -> None:
    observation = Observation(
        episode_id="e", attempt=1, turn=0, environment_lane="e0", policy="default", messages=(), deadline_ns=0,
        trained=trained, tokens_left=left,
    )  # fmt: skip
    assert find_lack_of_room(observation, 20, tokens, 100) == found
