"""The opponents of a learner's groups: drawn once for each, kept where requests name them already, and rated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fleetbus.config.seats import list_leagues
from fleetbus.config.settings import RunSettings
from fleetbus.core.training.opponents import draw_opponent, select_pool
from fleetbus.core.training.ratings import fit_ratings
from fleetbus.core.training.standings import Meeting, Score, Standings, add_games, list_games, list_meetings, sum_against
from fleetbus_schemas import EpisodeFinished, EpisodeRequested


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """All games up to a step, what they say of each opponent, as a checkpoint holds them, and the step's metrics."""

    standings: Standings
    against: Mapping[int, Score]
    meetings: tuple[Meeting, ...]
    metrics: Mapping[str, float]


class LearnerLeague:
    """``meetings`` are those of the checkpoint. Without a seat of a league nothing is drawn, kept or measured."""

    def __init__(self, run: RunSettings, meetings: Iterable[Meeting] = ()) -> None:
        self._leagues = list_leagues(run)
        self._seed = run.seed
        self._before = self._after = _count({}, list(meetings), is_rated=False)
        self._after_from = -1
        self._steps: dict[int, int] = {}
        self._named: defaultdict[str, list[Mapping[str, int]]] = defaultdict(list)
        """By group the opponents that its requests name; of one that learners before asked for in part perhaps several."""

    @property
    def seats(self) -> tuple[str, ...]:
        """Those that opponents play."""
        return tuple(self._leagues)

    @property
    def window(self) -> int:
        """Opponents are drawn from so many of the newest versions; 0 without a league."""
        return max((league.window for league in self._leagues.values()), default=0)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last step, see `measure`."""
        return self._after.metrics

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """All games, for a checkpoint."""
        return self._after.meetings

    def add_version(self, version: int, step: int) -> None:
        """The version is what ``step`` steps made, and was published or is about to be. One of a step that does not count any
        more is not to be given: it is nobody's opponent, and its games do not count."""
        self._steps[version] = step

    def adopt(self, request: EpisodeRequested) -> None:
        """A request of an earlier lineage names the opponents of its group: the others have the same."""
        opponents = {seat.seat: seat.version for seat in request.seats if seat.version is not None}
        if self._leagues and opponents not in self._named[request.group_id]:
            self._named[request.group_id].append(opponents)

    def draw(self, group_id: str, version: int) -> Mapping[str, int]:
        """The opponents of a group by seat, where ``version`` is the newest. A repetition draws the same: games count from the
        version on that was made of them."""
        if not self._leagues:
            return {}
        against = (self._after if version >= self._after_from else self._before).against
        drawn = {
            seat: draw_opponent(
                league.rule,
                select_pool(league, self._steps, version),
                against=against,
                seed=self._seed,
                group_id=group_id,
                seat=seat,
            )
            for seat, league in self._leagues.items()
        }
        named = self._named[group_id]
        opponents = {**drawn, **(named[0] if named else {})}
        if opponents not in named:
            named.append(opponents)
        return opponents

    def list_needed(self, open_groups: Collection[str]) -> set[int]:
        """The versions that requests of ``open_groups`` name, which are all that are open; the others are forgotten."""
        for group_id in self._named.keys() - set(open_groups):
            del self._named[group_id]
        return {version for named in self._named.values() for each in named for version in each.values()}

    async def record(self, results: Iterable[EpisodeFinished], version: int, offload: Callable[..., Awaitable[Any]]) -> None:
        """A step consumed these results, and makes ``version``. Games count between versions that do. With hundreds of them
        adding up takes longer than others on the event loop can wait: ``offload`` does it elsewhere."""
        if self._leagues:
            games = [game for game in list_games(results) if {game.version, game.opponent} <= self._steps.keys()]
            played = await offload(_count, self._after.standings, games)
            self._before, self._after, self._after_from = self._after, played, version


def _count(standings: Standings, games: Sequence[Meeting], *, is_rated: bool = True) -> Played:
    added = add_games(standings, games)
    return Played(
        standings=added,
        against=sum_against(added),
        meetings=list_meetings(added),
        metrics=measure(added, games) if is_rated else {},
    )


def measure(standings: Standings, games: Iterable[Meeting]) -> dict[str, float]:
    """The metrics of a step: ``league_rating`` of the newest version that has met another, its standard error, and the
    points per game of the step's ``games`` against other versions. What has no game has no metric."""
    metrics: dict[str, float] = {}
    if ratings := fit_ratings(standings):
        metrics |= {"league_rating": ratings[-1].rating, "league_rating_error": ratings[-1].error}
    score = sum((game.score for game in games if game.version != game.opponent), Score())
    return metrics | ({"league_win_rate": score.points / score.games} if score.games else {})
