"""Games between versions of a policy: who met whom how often, and how it ended. Pure.

A game is an episode in which a version plays a seat of a league. It is won, drawn or lost by the sign of what the policy's own
seats are worth beyond the opponent's: the mean of their rewards, less the opponent's `EpisodeSeat.score`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from fleetbus_schemas import GRADED, EpisodeFinished

MAX_VERSIONS = 512
"""Newest versions whose games are known."""


class Score(msgspec.Struct, frozen=True, array_like=True):
    """Games as one side sees them."""

    won: int = 0
    drawn: int = 0
    lost: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.won + other.won, self.drawn + other.drawn, self.lost + other.lost)

    @property
    def games(self) -> int:
        return self.won + self.drawn + self.lost

    @property
    def points(self) -> float:
        """A draw is half a win."""
        return self.won + self.drawn / 2


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """The games of ``version`` against ``opponent``, as ``version`` sees them."""

    version: int
    opponent: int
    score: Score


Standings = Mapping[tuple[int, int], Score]
"""By version and opponent."""


def list_games(results: Iterable[EpisodeFinished]) -> Iterator[Meeting]:
    """The games that results tell of. An episode that several versions sampled is the newest one's."""
    for result in results:
        own = [seat.reward for seat in result.seats if not seat.policy and seat.reward is not None]
        if result.outcome not in GRADED or not own or not result.policy_versions:
            continue
        for seat in result.seats:
            if seat.score is None or len(seat.versions) != 1:
                continue
            difference = sum(own) / len(own) - seat.score
            score = Score(int(difference > 0), int(difference == 0), int(difference < 0))
            yield Meeting(max(result.policy_versions), seat.versions[0], score)


def add_games(standings: Standings, games: Iterable[Meeting]) -> dict[tuple[int, int], Score]:
    """The standings after further games, without versions that are too old."""
    added = dict(standings)
    for game in games:
        key = game.version, game.opponent
        added[key] = added.get(key, Score()) + game.score
    oldest = sorted({version for pair in added for version in pair})[-MAX_VERSIONS:][:1]
    return {pair: score for pair, score in added.items() if min(pair) >= oldest[0]}


def sum_against(standings: Standings) -> dict[int, Score]:
    """By opponent the games of all versions against it."""
    against: dict[int, Score] = {}
    for (_, opponent), score in standings.items():
        against[opponent] = against.get(opponent, Score()) + score
    return against


def list_meetings(standings: Standings) -> tuple[Meeting, ...]:
    """The standings as a checkpoint holds them."""
    return tuple(Meeting(version, opponent, score) for (version, opponent), score in sorted(standings.items()))
