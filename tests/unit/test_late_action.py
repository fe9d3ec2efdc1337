"""One function decides about a late Action, whoever read what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.core.episode.late_action import AskedTurn, LateFacts, decide_late_action


def decide(*, check: int = 1, **facts: Any) -> str:
    asked = AskedTurn(observation_sequence=20, action_sequence=10, check=check)
    return decide_late_action(asked, LateFacts(**{"is_superseded": False, "action_sequence": 10} | facts))


@pytest.mark.parametrize("check", [1, 2, 9])
def test_a_turn_of_which_nothing_new_is_known_waits(check: int) -> None:
    assert decide(check=check) == "wait"
    assert decide(check=check, queued_sequence=20, acked_sequence=19) == "wait"


def test_a_newer_claim_or_a_result_comes_before_all_else() -> None:
    assert decide(is_superseded=True, is_answered=True, action_sequence=11) == "superseded"


def test_an_action_that_was_missed_is_taken_though_its_worker_is_gone() -> None:
    assert decide(is_answered=True, action_sequence=30, is_lane_usable=False) == "take"


def test_an_observation_whose_action_would_be_refused_is_sent_again() -> None:
    assert decide(action_sequence=11) == "resend"


@pytest.mark.parametrize("check", [1, 2])
def test_what_stands_on_a_lane_that_drains_or_is_silent_is_sent_again_at_once(check: int) -> None:
    assert decide(check=check, is_lane_usable=False) == "resend"


def test_what_a_living_worker_has_not_taken_is_sent_again_at_the_second_check() -> None:
    assert [decide(check=check, is_in_work=False) for check in (1, 2, 3)] == ["wait", "resend", "resend"]


@pytest.mark.parametrize(("queued", "acked"), [(0, 0), (19, 0), (20, 20), (20, 25)])
def test_what_was_acked_without_an_action_or_lost_is_sent_again(queued: int, acked: int) -> None:
    assert decide(queued_sequence=queued, acked_sequence=acked) == "resend"
