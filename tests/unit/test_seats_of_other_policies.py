"""Seats that another policy plays: how they are configured, what becomes of their turns, and what no result may claim."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from fleetbus.client.rollouts import _collect_sequences
from fleetbus.config.check import check_configuration
from fleetbus.config.seats import SeatSetting, build_seats, list_policies, parse_seats
from fleetbus.config.settings import Configuration, EpisodeSettings, InferenceSettings, RunSettings
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.errors import UserError
from fleetbus.interchange.atif_export import build_trajectory
from fleetbus.recording.episodes import read_transcript
from fleetbus_schemas import NEW_ROOT, EpisodeSeat, SamplingSettings, SeatPolicy, SegmentOrigin, UntrainedTurn, VersionSpan
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.episode.seats import EpisodeSeats, add_unseated
from tests.support.forged_seats import play_game
from tests.support.log_builder import audit_log, kinds, read_entries, start_log
from tests.unit.test_result_checks import action, finished
from tests.unit.test_seats import SHOWN

LINES = "user=simulator\njudge=gpt-4o@https://api.example.com/v1\nguide=http://127.0.0.1:8000\nold=model:runs/a/model"

SIMULATOR = SeatPolicy(seat="customer", policy="simulator")


def configured(seats: str, **inference: object) -> Configuration:
    settings = InferenceSettings(**inference)  # type: ignore[arg-type]
    return Configuration(run=RunSettings(seats=seats), inference=settings, episode=EpisodeSettings(seat_max_tokens=99))


def test_a_seat_names_a_policy_a_server_or_a_model() -> None:
    assert parse_seats(LINES) == (
        SeatSetting(seat="user", policy="simulator"),
        SeatSetting(seat="judge", policy="judge", url="https://api.example.com/v1", served_model="gpt-4o"),
        SeatSetting(seat="guide", policy="guide", url="http://127.0.0.1:8000"),
        SeatSetting(seat="old", policy="old", model="runs/a/model"),
    )
    assert [seat.is_served for seat in parse_seats(LINES)] == [False, True, True, True]
    assert list_policies(RunSettings(seats=LINES)) == ("default", "simulator", "judge", "guide", "old")
    sampling = SamplingSettings(max_tokens=99)
    assert build_seats(configured("user=simulator")) == (SeatPolicy(seat="user", policy="simulator", sampling=sampling),)
    check_configuration(configured(LINES))


@pytest.mark.parametrize(
    ("seats", "reason"),
    [
        ("user", "write SEAT=POLICY"),
        ("a b=c", "a seat is 1 to 128 letters"),
        ("user=a policy", "no policy's name"),
        ("user=a\nuser=b", "two policies for the seat user"),
        ("user=ftp://host", "must begin with http"),
        ("user=model:", "no policy's name"),
        ("user=train:", "no policy's name"),
        ("user=https://me:secret@host/v1", "must not contain a password"),
        ("user=default", "which is the policy that the run trains"),
    ],
)
def test_seats_that_cannot_be_are_refused_in_one_line(seats: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        check_configuration(configured(seats))
    assert "secret" not in str(refused.value)


def test_a_worker_of_another_policy_may_have_the_configuration_of_the_run() -> None:
    given = configured("user=default", frozen=True)
    check_configuration(given)
    check_configuration(replace(given, inference=InferenceSettings(engine="chat")))


def test_a_seat_of_another_policy_has_no_reward_whatever_the_verdict_says() -> None:
    seats = EpisodeSeats("desk", {"customer": SIMULATOR})
    for turn, seat in enumerate(("desk", "customer", "desk")):
        seats.take(Step(messages=SHOWN, seat=seat))
        assert seats.other == (SIMULATOR if seat == "customer" else None)
        seats.append(turn, turn)
    spans = [VersionSpan(version=number, start=0, stop=1) for number in range(3)]
    turns = [Turn(sequence=1, action=replace(action(0), versions=(span,)), lane="e0") for span in spans]
    assert seats.list_own_versions(turns) == (0, 2)
    reason = "the policy simulator plays it, which is not trained here"
    for described in (seats.describe({"desk": 1.0, "customer": 1.0}, 0.5), seats.describe({}, 1.0)):
        assert described[0].reward == 1.0
        assert described[1] == EpisodeSeat(name="customer", turns=(1,), reason=reason)
        assert add_unseated((), described) == (UntrainedTurn(turn=1, reason="seat"),)


def test_what_another_model_sampled_needs_no_log_probabilities_and_has_token_ids_of_its_own() -> None:
    strange = action(1, prompt_delta=pack_ids([888_888]), sampled=pack_ids([999_999]), logprobs=pack_logprobs([math.nan]))
    actions = [action(0), replace(strange, segment=1, origin=SegmentOrigin(parent=NEW_ROOT, kept=0, reason="seat"))]
    seats = (EpisodeSeat(name="desk", turns=(0,), reward=1.0), EpisodeSeat(name="customer", turns=(1,)))
    mask = pack_mask([False] * 3 + [True] * 2 + [False] * 2)
    result = finished(seats=seats, untrained=(UntrainedTurn(turn=1, reason="seat"),), loss_mask=mask, tokens=7)
    assert find_actions_problem(result, actions, vocabulary=100) == ""
    rewarded = replace(result, seats=(seats[0], replace(seats[1], reward=1.0)))
    assert "not finite" in find_actions_problem(rewarded, actions)
    assert "plays in the context of another" in find_actions_problem(result, [action(0), strange], vocabulary=100)
    finite = [action(0), replace(actions[1], logprobs=pack_logprobs([-1.0]))]
    assert "not below 100" in find_actions_problem(rewarded, finite, vocabulary=100)


def test_a_client_that_trains_gets_no_sequence_of_another_model() -> None:
    other = action(1, segment=1, origin=SegmentOrigin(parent=NEW_ROOT, kept=0, reason="seat"))
    turns = [Turn(sequence=number, action=each, lane="e0") for number, each in enumerate((action(0), other), 1)]
    seats = (EpisodeSeat(name="desk", turns=(0,), reward=1.0), EpisodeSeat(name="customer", turns=(1,)))
    result = finished(seats=seats, untrained=(UntrainedTurn(turn=1, reason="seat"),))
    assert [sequence.seat for sequence in _collect_sequences(turns, result)] == ["desk"]


def test_a_trajectory_names_the_policy_that_played_it() -> None:
    log_builder = start_log()
    play_game(log_builder, other="simulator")
    trajectory = build_trajectory(read_transcript(read_entries(log_builder)), run="run", version="1")
    assert trajectory.agent.model_name == "default"
    assert [each.agent.model_name for each in trajectory.subagent_trajectories or ()] == ["simulator"]


@pytest.mark.parametrize("other", ["", "simulator"])
async def test_a_game_of_two_seats_balances(other: str) -> None:
    log_builder = start_log()
    play_game(log_builder, other=other)
    report = await audit_log(log_builder)
    assert (kinds(report), report.unrewarded) == ({}, 1)
