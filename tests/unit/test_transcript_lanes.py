"""Transcripts say of each turn whose it was: the seat, and the policy that plays it."""

from __future__ import annotations

import pytest

from fleetbus.recording.episodes import read_transcript
from fleetbus_workers.cli.look.transcript import print_transcript
from fleetbus_workers.observe.monitor.episode_view import describe_seats
from tests.support.forged_seats import play_game
from tests.support.log_builder import read_entries, start_log

NO_REWARD = "its verdict is None"


@pytest.mark.parametrize(
    ("other", "heads", "by"),
    [
        ("", ["turn 0 · first ─", "turn 1 · second ─", "turn 2 · first ─"], ""),
        (
            "simulator",
            ["turn 0 · first (default) ─", "turn 1 · second (simulator) ─", "turn 2 · first (default) ─"],
            " · policy simulator",
        ),
    ],
)
def test_the_terminal_names_seat_and_policy_of_each_turn(
    capsys: pytest.CaptureFixture[str], other: str, heads: list[str], by: str
) -> None:
    log_builder = start_log()
    play_game(log_builder, other=other)
    print_transcript(read_transcript(read_entries(log_builder)), "a", tokens=False)
    shown = capsys.readouterr().out
    assert [head for head in heads if f"── {head}" in shown] == heads
    assert f"seat second: no reward ({NO_REWARD}), not trained · 1 turns{by}\n" in shown


@pytest.mark.parametrize(("other", "policy"), [("", "default"), ("simulator", "simulator")])
def test_the_page_has_a_lane_for_each_seat_with_its_policy_and_its_reward(other: str, policy: str) -> None:
    log_builder = start_log()
    play_game(log_builder, other=other)
    assert describe_seats(read_transcript(read_entries(log_builder))) == [
        {"seat": "first", "policy": "default", "turns": 2, "reward": 1.0, "reason": ""},
        {"seat": "second", "policy": policy, "turns": 1, "reward": None, "reason": NO_REWARD},
    ]


def test_an_episode_without_seats_has_no_lanes_and_one_without_a_result_has_no_rewards() -> None:
    log_builder = start_log()
    log_builder.play("a")
    assert describe_seats(read_transcript(read_entries(log_builder))) == []
    log_builder = start_log()
    play_game(log_builder)
    unfinished = [entry for entry in read_entries(log_builder) if b"EpisodeFinished" not in entry.payload]
    assert [seat["reward"] for seat in describe_seats(read_transcript(unfinished))] == [None, None]
