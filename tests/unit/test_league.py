"""A league: who is drawn, which versions are needed, and which games count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fleetbus.config.league import League
from fleetbus.config.settings import RunSettings
from fleetbus.core.training.groups import Group
from fleetbus.core.training.opponents import compute_weight, draw_opponent, select_pool
from fleetbus.core.training.rewarded_parts import list_opponents, list_parts
from fleetbus.core.training.standings import MAX_VERSIONS, Meeting, Score, add_games, list_games, list_meetings, sum_against
from fleetbus_schemas import ActionReference, EpisodeFinished, EpisodeRequested, EpisodeSeat, SeatPolicy, Task
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.episode.seats import EpisodeSeats
from fleetbus_workers.learner.league import LearnerLeague
from tests.support.small_deployment import run_inline
from tests.unit.test_seats import SHOWN

RUN = RunSettings(name="game", seats="second=league:uniform:3")
REQUEST = EpisodeRequested(
    episode_id="g000001-0",
    group_id="g000001",
    sample_index=0,
    split="train",
    task=Task(key="t"),
    policy="default",
    deadline_ns=1,
)


def finished(version: int, opponent: int, own: float | None, other: float | None, **changes: object) -> EpisodeFinished:
    seats = (
        EpisodeSeat(name="first", turns=(0,), reward=own),
        EpisodeSeat(name="second", turns=(1,), versions=(opponent,), score=other),
    )
    sound: dict[str, object] = {"outcome": "completed", "reward": 1.0, "seats": seats, "policy_versions": (version,)}
    return EpisodeFinished(group_id="g", attempt=1, worker="w", **{"episode_id": "e"} | sound | changes)  # type: ignore[arg-type]


def standings(*meetings: tuple[int, int, int, int, int]) -> dict[tuple[int, int], Score]:
    return add_games({}, [Meeting(version, opponent, Score(*score)) for version, opponent, *score in meetings])


def draw(rule: str, group: int, **changes: object) -> int:
    given: dict[str, object] = {"pool": range(10), "against": {}, "seed": 1, "seat": "second", "group_id": f"g{group}"}
    return draw_opponent(rule, **given | changes)  # type: ignore[arg-type]


def test_a_draw_is_uniform() -> None:
    drawn = Counter(draw("uniform", group, pool=[6, 7, 8, 9]) for group in range(4000))
    assert sorted(drawn) == [6, 7, 8, 9]
    assert max(abs(count - 1000) for count in drawn.values()) < 5 * math.sqrt(1000 * 0.75)
    assert {draw("newest", group) for group in range(9)} == {9}
    assert {draw("uniform", group, pool=[3]) for group in range(9)} == {3}


def test_a_draw_depends_on_the_seed_the_seat_and_the_group_alone() -> None:
    first = [draw("uniform", group) for group in range(50)]
    assert first == [draw("uniform", group) for group in range(50)]
    assert first != [draw("uniform", group, seed=2) for group in range(50)]
    assert first != [draw("uniform", group, seat="third") for group in range(50)]


def test_by_win_rate_who_is_hard_to_beat_is_drawn_most() -> None:
    against = sum_against(standings((9, 8, 0, 0, 98), (9, 7, 98, 0, 0), (8, 7, 0, 0, 0)))
    assert compute_weight(Score(won=3, drawn=2, lost=1)) == (1 - 5 / 8) ** 2, "the closed form"
    drawn = Counter(draw("win_rate", group, pool=[7, 8, 9], against=against) for group in range(3000))
    hard, easy, unknown = 0.99**2, 0.01**2, 0.5**2
    for version, weight in ((8, hard), (7, easy), (9, unknown)):
        share = weight / (hard + easy + unknown)
        assert abs(drawn[version] / 3000 - share) < 5 * math.sqrt(share * (1 - share) / 3000) + 1e-9


def test_the_last_versions_are_drawn_from() -> None:
    steps = dict(enumerate(range(10)))
    assert select_pool(League(rule="uniform", size=3), steps, 9) == [7, 8, 9]
    assert select_pool(League(rule="uniform", size=3), steps, 8) == [6, 7, 8], "later ones are not known yet"
    assert select_pool(League(rule="uniform", size=99), steps, 9) == list(range(10))
    assert select_pool(League(rule="uniform", size=3), {}, 9) == [9]


def test_versions_of_learners_that_began_again_and_again_do_not_crowd_out_the_others() -> None:
    """Each publishes what it begins with, which is nothing new."""
    steps = {0: 0, 1: 1, 2: 2, 3: 3, **dict.fromkeys(range(4, 7), 3)}
    assert select_pool(League(rule="uniform", size=3), steps, 6) == [1, 2, 6]
    assert select_pool(League(rule="uniform", size=3), steps | dict.fromkeys(range(7, 12), 3), 11) == [11], "files are finite"


def make_league(rule: str = "uniform:3", versions: int = 6) -> LearnerLeague:
    league = LearnerLeague(RunSettings(seats=f"second=league:{rule}"))
    for version in range(versions):
        league.add_version(version, version)
    return league


def test_a_group_that_requests_name_opponents_for_is_filled_up_with_the_same() -> None:
    drawn = make_league().draw("g000001", 5)["second"]
    other = next(version for version in (3, 4, 5) if version != drawn)
    league = make_league()
    league.adopt(replace(REQUEST, seats=(SeatPolicy(seat="second", policy="second", version=other),)))
    assert league.draw("g000001", 5) == {"second": other}
    assert league.draw("g000001", 8) == {"second": other}
    assert make_league(versions=9).draw("g000001", 5) == {"second": drawn}, "later versions are not known yet"
    assert LearnerLeague(RunSettings()).draw("g000001", 5) == {}


def test_the_versions_that_open_requests_name_are_needed() -> None:
    """However many learners begin meanwhile, and however long an episode takes."""
    league = make_league()
    for version in (0, 1):
        league.adopt(replace(REQUEST, seats=(SeatPolicy(seat="second", policy="second", version=version),)))
    drawn = league.draw("g000002", 5)["second"]
    assert league.list_needed(["g000001", "g000002"]) == {0, 1, drawn}
    assert league.list_needed(["g000002"]) == {drawn}, "what is settled needs nobody"
    assert league.list_needed([]) == set()


@pytest.mark.anyio
async def test_games_count_in_draws_from_the_version_on_that_was_made_of_them() -> None:
    hard = make_league("win_rate:2", 3)
    before = [hard.draw(f"g{group}", 1) for group in range(60)]
    await hard.record([finished(1, 1, 1.0, -1.0)] * 90, 2, run_inline)
    hard.list_needed([])
    assert [hard.draw(f"g{group}", 1) for group in range(60)] == before, "a request with version 1 draws as before"
    hard.list_needed([])
    assert Counter(hard.draw(f"g{group}", 2)["second"] for group in range(60))[1] < 3, "version 1 is always beaten"
    hard.list_needed([])
    again = LearnerLeague(RunSettings(seats="second=league:win_rate:2"), hard.meetings)
    for version in range(3):
        again.add_version(version, version)
    assert all(again.draw(f"g{group}", 2) == hard.draw(f"g{group}", 2) for group in range(60))


# Games


def test_a_game_is_won_by_what_the_own_seats_are_worth_beyond_the_opponent() -> None:
    results = [finished(5, 3, 1.0, -1.0), finished(5, 3, 0.5, 0.5), finished(5, 2, -2.0, -1.0)]
    left_out = [
        finished(5, 3, 1.0, None),
        finished(5, 3, None, 1.0),
        finished(5, 3, 1.0, -1.0, outcome="lost", reward=None),
        finished(5, 3, 1.0, -1.0, seats=(EpisodeSeat(name="first", turns=(0,), reward=1.0),)),
    ]
    assert list(list_games(left_out)) == []
    played = add_games({}, list_games(results))
    assert played == {(5, 3): Score(1, 1, 0), (5, 2): Score(0, 0, 1)}
    assert list_meetings(played) == (Meeting(5, 2, Score(0, 0, 1)), Meeting(5, 3, Score(1, 1, 0)))


def test_old_versions_leave_the_standings() -> None:
    played = add_games({}, (Meeting(version, version - 1, Score(1)) for version in range(1, MAX_VERSIONS + 50)))
    assert len({version for pair in played for version in pair}) == MAX_VERSIONS
    assert min(map(min, played)) == 50


def test_an_opponents_seat_has_a_score_and_no_reward() -> None:
    seats = EpisodeSeats("first", {"second": SeatPolicy(seat="second", policy="second", version=4)})
    for turn, seat in enumerate(("first", "second")):
        seats.take(Step(messages=SHOWN, seat=seat))
        seats.append(turn, turn)
    _, other = seats.describe({"first": 1.0, "second": -1.0}, 0.0)
    assert (other.reward, other.score, other.versions, other.policy) == (None, -1.0, (4,), "")
    assert seats.describe({}, 1.0)[1].score is None, "a reward that all share says nothing of who won"


def test_members_of_a_group_that_met_different_opponents_are_not_compared() -> None:
    references = tuple(ActionReference(sequence=turn, lane="e0", turn=turn) for turn in (1, 2))
    met = enumerate((3, 3, 4))
    results = [finished(5, each, 1.0, -1.0, episode_id=f"e{number}", actions=references, tokens=9) for number, each in met]
    assert [list_opponents(result) for result in results] == [(3,), (3,), (4,)]
    group = Group(group_id="g", size=3, results={result.episode_id: result for result in results})
    parts = list_parts([group])
    assert len(parts) == 3 and [part.group for part in parts] == [0, 0, 1]


@pytest.mark.anyio
async def test_no_game_counts_with_a_version_that_was_never_published_or_does_not_count() -> None:
    league = make_league(versions=3)
    played = [finished(2, 1, 1.0, -1.0), finished(2, 1, -1.0, 1.0)]
    others = [finished(2, 2**62, 1.0, -1.0), finished(2**62, 2**62 - 1, 1.0, -1.0)]
    await league.record([*played, *others], 3, run_inline)
    assert [(each.version, each.opponent) for each in league.meetings] == [(2, 1)]
    assert league.metrics["league_win_rate"] == 0.5


@pytest.mark.anyio
async def test_games_are_added_up_and_rated_beside_the_event_loop() -> None:
    """With hundreds of versions it takes longer than leases and heartbeats can wait."""
    offloaded: list[object] = []

    async def offload(function: Callable[..., object], *arguments: object) -> object:
        offloaded.append(function)
        return function(*arguments)

    await make_league().record([finished(2, 1, 1.0, -1.0)], 3, offload)
    assert len(offloaded) == 1
