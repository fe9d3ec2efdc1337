"""Ratings of versions by the games between them: Elo's scale, fitted as the model of Bradley and Terry. Pure.

Who sits on the policy's own side wins with the probability ``s = 1 / (1 + 10 ** ((R_j - R_i - A) / 400))``: ``R_i`` is
its rating, ``R_j`` the opponent's, and ``A`` what that side is worth, which may not be fair; games of a version against
itself tell it. A draw is half a win. All are those of the greatest likelihood over all games (Hunter, Annals of
Statistics 2004, of Bradley, Terry and a home advantage), in which every two versions that met have drawn once more, and
one version once with itself, so that nothing is infinite. The standard errors are those of the likelihood's curvature:
the roots of the diagonal of the inverse of ``H = (ln 10 / 400) ** 2 * sum(n_ij * s_ij * (1 - s_ij) * x_ij x_ij^T)`` with
``x_ij = e_i - e_j + e_A``, without the version that is rated 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from fleetbus.core.training.standings import Standings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

ELO = 400 / math.log(10)
"""Points of rating for each natural unit of log-odds."""

MAX_ROUNDS = 100
TOLERANCE = 1e-10


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """Points of Elo beyond the oldest version that is connected by games, which is rated 0 without an error; its standard
    ``error``; and the ``games`` against other versions that tell of it."""

    version: int
    rating: float
    error: float
    games: int


def fit_ratings(standings: Standings) -> list[Rating]:
    """The ratings of all versions that games connect with the newest one that played, ascending by version."""
    met = {pair: score for pair, score in standings.items() if score.games}
    versions = _connect([pair for pair in met if pair[0] != pair[1]])
    if not versions:
        return []
    place = {version: number for number, version in enumerate(versions)}
    alone = [score for (version, opponent), score in met.items() if version == opponent]
    rows = [(0, 0, sum(score.points for score in alone), sum(score.games for score in alone))]
    for (version, opponent), score in met.items():
        if version != opponent and version in place:
            rows.append((place[version], place[opponent], score.points, score.games))
    import numpy as np  # views of runs without a league do without it

    own, other = (np.array([row[side] for row in rows]) for side in (0, 1))
    points, games = (np.array([row[number] for row in rows], dtype=np.float64) for number in (2, 3))
    strengths, curvature = _maximise(own, other, points + 0.5, games + 1.0, len(versions))
    errors = np.sqrt(np.diag(np.linalg.inv(curvature)))
    counts = np.bincount(own[1:], games[1:], len(versions)) + np.bincount(other[1:], games[1:], len(versions))
    return [
        Rating(
            version=version,
            rating=round(float(strengths[number]) * ELO, 3),
            error=round(float(errors[number - 1]) * ELO, 3) if number else 0.0,
            games=round(float(counts[number])),
        )
        for number, version in enumerate(versions)
    ]


def _connect(pairs: list[tuple[int, int]]) -> list[int]:
    """The versions that a chain of games connects with the newest one, ascending."""
    neighbours: defaultdict[int, set[int]] = defaultdict(set)
    for low, high in pairs:
        neighbours[low].add(high)
        neighbours[high].add(low)
    found: set[int] = set()
    open_versions = [max(neighbours)] if neighbours else []
    while open_versions:
        version = open_versions.pop()
        if version not in found:
            found.add(version)
            open_versions += neighbours[version]
    return sorted(found)


def _maximise(
    own: npt.NDArray[np.intp], other: npt.NDArray[np.intp], points: Floats, games: Floats, count: int
) -> tuple[Floats, Floats]:
    """Newton's method, halving steps that would not climb. ``points`` are those of ``own`` in ``games`` against ``other``, by
    the places of ``count`` versions. The strengths in natural units, the first of them 0, and behind them what the own side is
    worth; and the curvature of all but the first."""
    import numpy as np

    strengths = np.zeros(count + 1)

    def likelihood(at: Floats) -> float:
        ahead = at[own] - at[other] + at[count]
        return float(np.sum(points * ahead - games * np.logaddexp(0.0, ahead)))

    def add_up(of_row: Floats) -> Floats:
        return np.asarray(np.bincount(own, of_row, count) - np.bincount(other, of_row, count), dtype=np.float64)

    for _ in range(MAX_ROUNDS):
        share = 1 / (1 + np.exp(strengths[other] - strengths[own] - strengths[count]))
        slope = np.append(add_up(points - games * share), np.sum(points - games * share))
        weight = games * share * (1 - share)
        curvature = np.zeros((count + 1, count + 1))
        for row, column, sign in ((own, own, 1), (other, other, 1), (own, other, -1), (other, own, -1)):
            np.add.at(curvature, (row, column), sign * weight)
        curvature[count, :count] = curvature[:count, count] = add_up(weight)
        curvature[count, count] = np.sum(weight)
        step = np.zeros(count + 1)
        step[1:] = np.linalg.solve(curvature[1:, 1:], slope[1:])
        before = likelihood(strengths)
        while likelihood(strengths + step) < before and np.abs(step).max() > TOLERANCE:
            step /= 2
        strengths = strengths + step
        if np.abs(step).max() <= TOLERANCE:
            break
    return strengths, curvature[1:, 1:]
