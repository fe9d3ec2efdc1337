"""A league: how it is configured, who is drawn, what is kept, and how versions are rated by their games."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fleetbus.config.check import check_configuration
from fleetbus.config.engines import is_frozen
from fleetbus.config.league import League
from fleetbus.config.seats import build_seats, configure_seat, freeze_trained, list_leagues, list_policies, parse_seats
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus.core.training.groups import Group
from fleetbus.core.training.opponents import compute_weight, draw_opponent, select_pool
from fleetbus.core.training.ratings import ELO, fit_ratings
from fleetbus.core.training.retention import KEPT_CHECKPOINTS, KEPT_VERSIONS, Retention
from fleetbus.core.training.rewarded_parts import list_opponents, list_parts
from fleetbus.core.training.standings import MAX_VERSIONS, Meeting, Score, add_games, list_games, list_meetings, sum_against
from fleetbus.errors import UserError
from fleetbus_schemas import (
    ActionReference,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    FloorRaised,
    PolicyPublished,
    SeatPolicy,
    Task,
)
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.episode.seats import EpisodeSeats
from fleetbus_workers.learner.league import LearnerLeague, measure
from fleetbus_workers.observe.run.league_table import MOST_WAITING, LeagueTable
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


# Configuration


def test_a_league_is_a_policy_of_its_own_that_serves_versions_of_the_runs() -> None:
    (seat,) = parse_seats(RUN.seats)
    assert seat.league == League(rule="uniform", size=3) and seat.is_served and not seat.trained
    assert list_policies(RUN) == ("default", "second")
    assert list_leagues(RunSettings(seats="a=league:newest\nb=league:win_rate:9\nc=other")) == {
        "a": League(rule="newest"),
        "b": League(rule="win_rate", size=9),
    }
    configuration = Configuration(run=RUN)
    check_configuration(configuration)
    served = configure_seat(configuration, seat)
    assert (served.run.policy, served.inference.versions_of, served.inference.frozen) == ("second", "default", True)
    assert is_frozen(InferenceSettings(versions_of="default")), "it waits for no version of its own"
    assert build_seats(configuration)[0].version is None, "a request names it"
    assert freeze_trained(RUN.seats, "m") == "second=model:m", "without a run there are no versions"


@pytest.mark.parametrize("rule", ["", ":", ":uniform", ":uniform:0", ":best:3", ":uniform:257", ":newest:3"])
def test_a_league_that_cannot_be_is_refused_in_one_line(rule: str) -> None:
    with pytest.raises(UserError, match="write league:newest, league:uniform:K or league:win_rate:K"):
        parse_seats(f"second=league{rule}")


@pytest.mark.parametrize("slip", ["leagueuniform3", "league-uniform-3", "League_newest", "uniform", "win-rate5", "league3"])
def test_a_policy_that_is_called_as_a_league_hardly_is_one(slip: str) -> None:
    with pytest.raises(UserError, match=f"second={slip}: write league:newest, league:uniform:K or league:win_rate:K"):
        parse_seats(f"second={slip}")


@pytest.mark.parametrize("name", ["leaguer", "uniformed", "the_newest", "major_league", "rival"])
def test_other_names_are_policies(name: str) -> None:
    assert parse_seats(f"second={name}")[0].policy == name


def enter_versions(retention: Retention, count: int, window: int) -> None:
    published = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
    for number in range(count):
        retention.enter(number + 1, "fb.game.policy.default", replace(published, version=number, window=window))


@pytest.mark.parametrize(("window", "kept"), [(0, KEPT_VERSIONS), (5, KEPT_VERSIONS), (40, 40)])
def test_the_log_keeps_the_versions_that_requests_may_name_and_no_more(window: int, kept: int) -> None:
    """A month of steps has forty thousand, each with the manifest of a whole model."""
    retention = Retention()
    enter_versions(retention, 1000, window)
    assert retention.find_first_needed("policy", "default", 2000) == 1001 - kept


@pytest.mark.parametrize(("window", "kept"), [(0, KEPT_VERSIONS), (40, 40)])
def test_an_archive_keeps_them_for_a_log_that_is_restored(window: int, kept: int) -> None:
    retention = Retention()
    enter_versions(retention, 1000, window)
    for number in range(KEPT_CHECKPOINTS):
        stored = CheckpointStored(lineage="l1", step=number, version=999, file="", floor=1500)
        retention.enter(1500 + number, "fb.game.train.default", stored)
    retention.enter(1600, "fb.game.floor", FloorRaised(sequence=1500, groups={"default": 9}))
    assert retention.find_archive_floor() == 1001 - kept


def test_the_first_version_stays_in_the_log() -> None:
    """On the subject of the league's own policy, which has no other."""
    retention = Retention()
    enter_versions(retention, 1000, 9)
    first = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
    retention.enter(2, "fb.game.policy.second", first)
    assert retention.find_first_needed("policy", "second", 2000) == 0
    assert ("policy", "second") in retention.list_names()


# Draws


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


# Ratings


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def variance(share: float, games: int) -> float:
    """Of a logit that is estimated from so many games."""
    return 1 / (games * share * (1 - share))


def test_two_players_have_the_closed_form_of_two_logits_and_their_errors() -> None:
    """Against itself the version shows what the side is worth; what it gains beyond that is its strength."""
    (anchor, rated) = fit_ratings(standings((7, 2, 60, 20, 20), (7, 7, 30, 0, 50), (2, 2, 10, 0, 10)))
    share, alone = 70.5 / 101, 40.5 / 101
    assert (anchor.version, anchor.rating, anchor.error) == (2, 0.0, 0.0)
    assert (rated.version, rated.games) == (7, 100)
    assert rated.rating == pytest.approx(ELO * (logit(share) - logit(alone)), abs=1e-3)
    assert rated.error == pytest.approx(ELO * math.sqrt(variance(share, 101) + variance(alone, 101)), abs=1e-3)


def test_without_games_against_oneself_the_error_says_that_the_side_is_not_known() -> None:
    rated = fit_ratings(standings((1, 0, 60, 0, 40)))[-1]
    assert rated.rating == pytest.approx(ELO * logit(60.5 / 101), abs=1e-3)
    assert rated.error == pytest.approx(ELO * math.sqrt(variance(60.5 / 101, 101) + variance(0.5, 1)), abs=1e-3)


def test_an_unfair_side_makes_no_ratings() -> None:
    """All versions are alike, and the side of the policy loses three games in four."""
    pairs = [(version, version - back) for version in range(20) for back in (0, 1, 2) if version >= back]
    ratings = fit_ratings(standings(*((*pair, 1000, 0, 3000) for pair in pairs)))
    assert len(ratings) == 20
    assert all(abs(each.rating) < each.error / 2 for each in ratings[1:])
    assert ratings[-1].error < 30, "of 191 points that the side is worth, 19 versions long"


def test_who_won_every_game_has_a_finite_rating() -> None:
    rated = fit_ratings(standings((1, 0, 1000, 0, 0)))[-1]
    assert rated.rating == pytest.approx(400 * math.log10(1000.5 / 0.5), abs=1e-3)
    assert math.isfinite(rated.error)


def test_along_a_chain_ratings_add_up_and_errors_as_independent_ones() -> None:
    """Where so many games against oneself say that the sides are equal, in a tree of games every pair is fitted exactly."""
    known = (0, 0, 10**9, 0, 10**9)
    ratings = fit_ratings(standings((1, 0, 60, 0, 40), (2, 1, 70, 0, 30), known))
    gains = [ELO * logit(share) for share in (60.5 / 101, 70.5 / 101)]
    assert [each.rating for each in ratings] == pytest.approx([0, gains[0], sum(gains)], abs=2e-3)
    assert ratings[2].error == pytest.approx(ELO * math.sqrt(variance(60.5 / 101, 101) + variance(70.5 / 101, 101)), abs=1e-2)


def test_ratings_are_found_again_from_games_that_were_played_by_them() -> None:
    """Also where the own side is worth 60 points less."""
    true, side = [0.0, 80.0, 150.0, 300.0], -60.0
    met = []
    for version in range(4):
        for opponent in range(version + 1):
            won = round(4000 / (1 + 10 ** ((true[opponent] - true[version] - side) / 400)))
            met.append((version, opponent, won, 0, 4000 - won))
    for each, rating in zip(fit_ratings(standings(*met)), true, strict=True):
        assert abs(each.rating - rating) <= 2.0 and each.error < 12.0


def test_ratings_are_where_points_equal_what_is_expected_of_them() -> None:
    """The likelihood's own equations, in a pool where all met all and the sides are known to be equal."""
    met = standings((1, 0, 20, 3, 9), (2, 0, 30, 0, 5), (2, 1, 12, 6, 11), (3, 2, 8, 1, 8), (3, 0, 9, 9, 2))
    known = standings((0, 0, 10**9, 0, 10**9))
    ratings = {each.version: each.rating for each in fit_ratings(met | known)}
    for player in (1, 2, 3):
        surplus = 0.0
        for (version, opponent), score in met.items():
            if player in (version, opponent):
                points = (score.points if player == version else score.games - score.points) + 0.5
                other = opponent if player == version else version
                surplus += points - (score.games + 1) / (1 + 10 ** ((ratings[other] - ratings[player]) / 400))
        assert abs(surplus) < 1e-3


def test_versions_without_games_to_others_have_no_rating() -> None:
    assert fit_ratings({}) == fit_ratings(standings((3, 3, 5, 0, 5))) == []
    apart = fit_ratings(standings((1, 0, 5, 0, 5), (9, 8, 5, 0, 5)))
    assert [each.version for each in apart] == [8, 9], "those that the newest is connected with"


def test_a_step_measures_the_newest_version_and_its_own_games() -> None:
    games = [Meeting(4, 3, Score(3, 1, 0)), Meeting(4, 4, Score(9, 0, 0))]
    metrics = measure(add_games({}, games), games)
    assert metrics["league_win_rate"] == 3.5 / 4
    assert metrics["league_rating"] == pytest.approx(ELO * (logit(4 / 5) - logit(9.5 / 10)), abs=1e-3)
    assert measure({}, []) == {}


def test_a_long_run_is_rated_whole() -> None:
    pairs = [(version, version - back) for version in range(1, MAX_VERSIONS) for back in (1, 2, 3) if version >= back]
    assert len(fit_ratings(standings(*((*pair, 5, 1, 4) for pair in pairs)))) == MAX_VERSIONS


def test_the_page_has_a_table_of_the_versions_that_have_played() -> None:
    table = LeagueTable()
    assert table.rows == []
    for result in (*[finished(2, 1, 1.0, -1.0)] * 3, finished(3, 2, 0.0, 0.0), finished(3, 0, 1.0, -1.0, split="eval")):
        table.apply(result)
    assert [(row.version, row.games) for row in table.rows] == [(3, 1), (2, 4), (1, 3)]
    assert table.rows[0].rating == pytest.approx(table.rows[1].rating, abs=1e-3), "they drew"
    assert table.rows[-1].rating == 0.0
    for _ in range(MOST_WAITING):
        table.apply(finished(4, 3, 1.0, -1.0))
    assert table.rows[0].games == MOST_WAITING
    for _ in range(MOST_WAITING // 64):
        table.apply(finished(4, 3, 1.0, -1.0))
        assert table.rows[0].games == MOST_WAITING, "not fitted for each game: the page asks twice a second"
    for _ in range(2):
        table.apply(finished(4, 3, 1.0, -1.0))
    assert table.rows[0].games == MOST_WAITING + MOST_WAITING // 64 + 2


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
