"""The opponents of a learner's groups: drawn once for each, kept where requests name them already, and rated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fleetbus.config.seats import list_leagues
from fleetbus.config.settings import RunSettings
from fleetbus.core.training.opponents import draw_opponent
from fleetbus.core.training.ratings import fit_ratings
from fleetbus.core.training.standings import Meeting, Score, Standings, add_games, list_games, list_meetings
from fleetbus_schemas import EpisodeFinished, EpisodeRequested


class LearnerLeague:
    """``meetings`` are those of the checkpoint. Without a seat of a league nothing is drawn, kept or measured."""

    def __init__(self, run: RunSettings, meetings: Iterable[Meeting] = ()) -> None:
        self._leagues = list_leagues(run)
        self._seed = run.seed
        self._before = self._after = add_games({}, meetings)
        self._after_from = -1
        self._named: dict[str, Mapping[str, int]] = {}
        self.metrics: Mapping[str, float] = {}
        """Of the last step, see `measure`."""

    @property
    def seats(self) -> tuple[str, ...]:
        """Those that opponents play."""
        return tuple(self._leagues)

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """All games, for a checkpoint."""
        return list_meetings(self._after)

    def adopt(self, request: EpisodeRequested) -> None:
        """A request of an earlier lineage names the opponents of its group: the others have the same."""
        if self._leagues:
            opponents = {seat.seat: seat.version for seat in request.seats if seat.version is not None}
            self._named.setdefault(request.group_id, opponents)

    def draw(self, group_id: str, version: int, versions: Iterable[int]) -> Mapping[str, int]:
        """The opponents of a group by seat, where ``version`` is the newest of the published ``versions``. A repetition with
        the same ones draws the same: games count from the version on that was made of them."""
        if not self._leagues:
            return {}
        standings = self._after if version >= self._after_from else self._before
        pool = {each for each in versions if each <= version} | {version}
        drawn = {
            seat: draw_opponent(
                league.rule,
                league.size,
                versions=pool,
                standings=standings,
                seed=self._seed,
                group_id=group_id,
                seat=seat,
            )
            for seat, league in self._leagues.items()
        }
        return {**drawn, **self._named.pop(group_id, {})}

    def record(self, results: Iterable[EpisodeFinished], version: int, versions: Collection[int]) -> None:
        """A step consumed these results, and makes ``version``. Games count between ``versions`` that were published."""
        if self._leagues:
            games = [game for game in list_games(results) if game.version in versions and game.opponent in versions]
            self._before, self._after_from = self._after, version
            self._after = add_games(self._after, games)
            self.metrics = measure(self._after, games)


def measure(standings: Standings, games: Iterable[Meeting]) -> dict[str, float]:
    """The metrics of a step: ``league_rating`` of the newest version that has met another, its standard error, and the
    points per game of the step's ``games`` against other versions. What has no game has no metric."""
    metrics: dict[str, float] = {}
    if ratings := fit_ratings(standings):
        metrics |= {"league_rating": ratings[-1].rating, "league_rating_error": ratings[-1].error}
    score = sum((game.score for game in games if game.version != game.opponent), Score())
    return metrics | ({"league_win_rate": score.points / score.games} if score.games else {})
