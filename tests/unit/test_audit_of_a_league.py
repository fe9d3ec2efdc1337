"""The books of episodes with an opponent: played as requested they balance, and each fault has its name."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fleetbus_schemas import EpisodeSeat, PolicyPublished, SeatPolicy
from fleetbus_schemas.tokens import EMPTY_HISTORY, pack_mask
from tests.support.forged_seats import ORIGIN, SEGMENTS, TOKENS, UNTRAINED
from tests.support.log_builder import PROMPT, SAMPLED, SUBJECTS, LogBuilder, audit_log, compute_history_hash, kinds, start_log

OPPONENT = 1
FIRST = EpisodeSeat(name="first", turns=(0, 2), reward=1.0)
SECOND = EpisodeSeat(name="second", turns=(1,), versions=(OPPONENT,), score=-1.0)


def play_game(log_builder: LogBuilder, *, asked: int | None = OPPONENT, played: int = OPPONENT, **changes: Any) -> None:
    """Two turns of the newest version, 2, and one of the opponent between them, of which ``asked`` was asked for."""
    log_builder.request("a", seats=(SeatPolicy(seat="second", policy="second", version=OPPONENT),))
    log_builder.claim("a")
    actions = []
    for turn, (seat, segment, before) in enumerate((("first", 0, 0), ("second", 1, 0), ("first", 0, 1))):
        is_other = seat == "second"
        log_builder.observe(
            "a",
            turn,
            history_hash=compute_history_hash(before) if before else EMPTY_HISTORY,
            seat=seat,
            segment=segment,
            origin=ORIGIN if is_other else None,
            policy="second" if is_other else "default",
            pinned_version=asked if is_other else None,
        )
        action: dict[str, Any] = {"segment": segment, "origin": ORIGIN if is_other else None}
        hashed = compute_history_hash(before + 1)
        actions.append(log_builder.act("a", turn, version=played if is_other else 2, history_hash=hashed, **action))
    mask = [*[False] * PROMPT, *[True] * SAMPLED, *[False] * TOKENS, *[False] * PROMPT, *[True] * SAMPLED]
    sound = {"seats": (FIRST, SECOND), "segments": SEGMENTS, "untrained": UNTRAINED, "loss_mask": pack_mask(mask)}
    log_builder.finish("a", actions, **sound | changes)


def start_league() -> LogBuilder:
    log_builder = start_log()
    for number in (1, 2):
        log_builder.version(number)
    return log_builder


async def test_a_game_against_the_version_that_was_requested_balances() -> None:
    log_builder = start_league()
    play_game(log_builder)
    log_builder.step(1, ["a"])
    report = await audit_log(log_builder)
    assert (kinds(report), report.books.trained, report.unrewarded) == ({}, 1, 1)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("opponent_wrong", {"asked": 2, "played": 2}),
        ("opponent_wrong", {"asked": None}),
        ("opponent_wrong", {"played": 2}),
        ("version_unpublished", {"played": 77}),
        ("seats_wrong", {"seats": (FIRST, EpisodeSeat(name="second", turns=(1,), versions=(2,), score=-1.0))}),
        ("seats_wrong", {"seats": (FIRST, EpisodeSeat(name="second", turns=(1,), reward=-1.0, versions=(OPPONENT,)))}),
        ("seats_wrong", {"untrained": ()}),
    ],
    ids=["drawn anew", "not pinned", "played by another", "played by nobody's", "named otherwise", "rewarded", "trained"],
)
async def test_an_opponent_that_is_not_as_requested_is_found(kind: str, fault: dict[str, Any]) -> None:
    log_builder = start_league()
    play_game(log_builder, **fault)
    assert kinds(await audit_log(log_builder)).get(kind) == ("a",)


async def test_an_opponent_that_is_drawn_anew_when_an_episode_is_taken_over_is_found() -> None:
    log_builder = start_league()
    log_builder.request("a", seats=(SeatPolicy(seat="second", policy="second", version=OPPONENT),))
    log_builder.claim("a")
    log_builder.observe("a", 0, seat="second", policy="second", pinned_version=OPPONENT, history_hash=EMPTY_HISTORY)
    log_builder.claim("a", 2)
    assert kinds(await audit_log(log_builder)) == {}
    log_builder.observe("a", 0, 2, seat="second", policy="second", pinned_version=2, history_hash=EMPTY_HISTORY)
    assert kinds(await audit_log(log_builder)) == {"opponent_wrong": ("a",)}


@pytest.mark.parametrize(("version", "found"), [(1, {}), (9, {"version_elsewhere": ("second/9",)})])
async def test_what_stands_on_the_subject_of_a_league_is_a_version_of_the_policy(
    version: int, found: dict[str, tuple[str, ...]]
) -> None:
    """The first one, for held-out episodes; the worker that plays it would load whatever stands there."""
    log_builder = start_league()
    first = PolicyPublished(policy="default", version=version, lineage="l1", step=1, uri="", manifest=(), size_bytes=0)
    log_builder.add(SUBJECTS.policy("second"), first)
    play_game(log_builder)
    log_builder.step(1, ["a"])
    report = await audit_log(log_builder)
    assert kinds(report) == found
    assert report.versions == 3, "it is published once"


FIRST_VERSION = PolicyPublished(policy="default", version=1, lineage="l1", step=1, uri="", manifest=(), size_bytes=0)


@pytest.mark.parametrize(
    ("subject", "entries", "found"),
    [
        ("second", [FIRST_VERSION, replace(FIRST_VERSION, version=2, step=2)], ("second/2",)),
        ("second", [replace(FIRST_VERSION, step=2)], ("second/1",)),
        ("second", [replace(FIRST_VERSION, uri="http://evil/l9-v000001.safetensors", lineage="l9")], ("second/1",)),
        ("solver", [FIRST_VERSION], ("solver/1",)),
    ],
    ids=["a second one", "of another step", "of a lineage that nobody began", "where a policy has versions of its own"],
)
async def test_no_other_version_is_put_where_a_worker_of_the_league_would_load_it(
    subject: str, entries: list[PolicyPublished], found: tuple[str, ...]
) -> None:
    log_builder = start_league()
    log_builder.version(0, policy="solver")
    for published in entries:
        log_builder.add(SUBJECTS.policy(subject), published)
    log_builder.version(3)
    log_builder.version(4, policy="solver")  # later ones of the policies themselves are not blamed
    assert kinds(await audit_log(log_builder)) == {"version_elsewhere": found}


async def test_nothing_is_published_under_the_name_of_a_league_after_its_first_version() -> None:
    log_builder = start_league()
    log_builder.add(SUBJECTS.policy("second"), FIRST_VERSION)
    log_builder.version(3, policy="second")
    assert kinds(await audit_log(log_builder)) == {"version_elsewhere": ("second/3",)}
