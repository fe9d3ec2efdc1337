"""Ratings of versions by the games between them: Elo's scale, fitted as the model of Bradley and Terry. Pure.

Version i wins against j with the probability ``s = 1 / (1 + 10 ** ((R_j - R_i) / 400))``; a draw is half a win for each. The
ratings are those of the greatest likelihood over all games, in which every two versions that met have drawn once more, so that
nobody's is infinite (Hunter, Annals of Statistics 2004, for the model). Games of a version against itself say nothing. The
standard errors are those of the likelihood's curvature: the roots of the diagonal of the inverse of
``H = (ln 10 / 400) ** 2 * sum(n_ij * s_ij * (1 - s_ij) * (e_i - e_j)(e_i - e_j)^T)``, without the version that is rated 0.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec
import numpy as np
import numpy.typing as npt

from fleetbus.core.training.standings import Standings

ELO = 400 / math.log(10)
"""Points of rating for each natural unit of log-odds."""

MAX_ROUNDS = 100
TOLERANCE = 1e-10

Floats = npt.NDArray[np.float64]


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """Points of Elo beyond the oldest version that is connected by games, which is rated 0 without an error; its standard
    ``error``; and the ``games`` against other versions that tell of it."""

    version: int
    rating: float
    error: float
    games: int


def fit_ratings(standings: Standings) -> list[Rating]:
    """The ratings of all versions that games connect with the newest one that played, ascending by version."""
    met: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (version, opponent), score in standings.items():
        if version != opponent and score.games:
            counted = met[min(version, opponent), max(version, opponent)]
            counted[0] += score.points if version > opponent else score.games - score.points
            counted[1] += score.games
    versions = _connect(list(met))
    if not versions:
        return []
    pairs = [pair for pair in met if pair[0] in versions]
    place = {version: number for number, version in enumerate(versions)}
    low, high = (np.array([place[pair[side]] for pair in pairs]) for side in (0, 1))
    won, games = (np.array([met[pair][number] + drawn for pair in pairs]) for number, drawn in ((0, 0.5), (1, 1.0)))
    strengths, curvature = _maximise(low, high, won, games, len(versions))
    errors = np.sqrt(np.diag(np.linalg.inv(curvature)))
    counts = np.bincount(low, games - 1, len(versions)) + np.bincount(high, games - 1, len(versions))
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
    low: npt.NDArray[np.intp], high: npt.NDArray[np.intp], won: Floats, games: Floats, count: int
) -> tuple[Floats, Floats]:
    """Newton's method, halving steps that would not climb: strengths in natural units, the first of them 0, and the curvature
    of all others. ``won`` are points of ``high`` in ``games`` against ``low``."""
    strengths = np.zeros(count)

    def likelihood(at: Floats) -> float:
        ahead = at[high] - at[low]
        return float(np.sum(won * ahead - games * np.logaddexp(0.0, ahead)))

    for _ in range(MAX_ROUNDS):
        share = 1 / (1 + np.exp(strengths[low] - strengths[high]))
        slope = np.bincount(high, won - games * share, count) - np.bincount(low, won - games * share, count)
        weight = games * share * (1 - share)
        curvature = np.diag(np.bincount(high, weight, count) + np.bincount(low, weight, count))
        np.add.at(curvature, (low, high), -weight)
        np.add.at(curvature, (high, low), -weight)
        step = np.zeros(count)
        step[1:] = np.linalg.solve(curvature[1:, 1:], slope[1:])
        before = likelihood(strengths)
        while likelihood(strengths + step) < before and np.abs(step).max() > TOLERANCE:
            step /= 2
        strengths = strengths + step
        if np.abs(step).max() <= TOLERANCE:
            break
    return strengths, curvature[1:, 1:]
