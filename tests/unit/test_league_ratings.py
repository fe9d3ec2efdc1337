"""A league: how versions are rated by their games."""

from __future__ import annotations

import math

import pytest

from fleetbus.core.training.ratings import ELO, fit_ratings
from fleetbus.core.training.standings import MAX_VERSIONS, Meeting, Score, add_games
from fleetbus_workers.learner.league import measure
from fleetbus_workers.observe.run.league_table import MOST_WAITING, LeagueTable
from tests.unit.test_league import finished, standings


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
