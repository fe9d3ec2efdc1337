"""The versions of a league with their ratings, as the page shows them: a fold of results. Pure."""

from __future__ import annotations

from fleetbus.core.training.ratings import Rating, fit_ratings
from fleetbus.core.training.standings import Standings, add_games, list_games
from fleetbus_schemas import EpisodeFinished

MOST_ROWS = 50
MOST_WAITING = 1024
"""Results that are counted together."""

REFIT_SHARE = 1 / 64
"""Of the games that the ratings are of: with so many more they are fitted again. With hundreds of versions it takes 50 ms."""


class LeagueTable:
    """The games of all graded training episodes, trained or not."""

    def __init__(self) -> None:
        self._standings: Standings = {}
        self._waiting: list[EpisodeFinished] = []
        self._rows: list[Rating] = []
        self._games = self._further = 0
        """Those that the rows are of, and those since."""

    def apply(self, result: EpisodeFinished) -> None:
        """Take in a result."""
        if result.split == "train" and any(seat.score is not None for seat in result.seats):
            self._waiting.append(result)
            self._further += 1
            if len(self._waiting) >= MOST_WAITING:
                self._count()

    @property
    def rows(self) -> list[Rating]:
        """The newest versions that have played, newest first, as of almost all games so far; none without a league."""
        if self._further > self._games * REFIT_SHARE:
            self._count()
            self._games, self._further = self._games + self._further, 0
            self._rows = fit_ratings(self._standings)[: -MOST_ROWS - 1 : -1]
        return self._rows

    def _count(self) -> None:
        self._standings = add_games(self._standings, list_games(self._waiting))
        self._waiting.clear()
