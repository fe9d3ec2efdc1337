"""A league: how it is configured, and what is refused."""

from __future__ import annotations

import pytest

from fleetbus.config.check import check_configuration
from fleetbus.config.engines import is_frozen
from fleetbus.config.league import League
from fleetbus.config.seats import build_seats, configure_seat, freeze_trained, list_leagues, list_policies, parse_seats
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus.errors import UserError

RUN = RunSettings(name="game", seats="second=league:uniform:3")


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
