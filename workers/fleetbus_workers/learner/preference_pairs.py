"""Pairs of episodes of one group, one rewarded more than the other, out of recordings. Blocking.

The best of a group stands beside its worst, the second best beside the second worst, and so on: no episode is in two pairs.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.rejection_sampling import Selection, build_sequences, read_actions, read_results


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The leaves of the episode that was rewarded more, and of the other."""

    chosen: tuple[TrainingSequence, ...]
    rejected: tuple[TrainingSequence, ...]


class PairSelection(msgspec.Struct, kw_only=True):
    """The pairs found; why graded episodes are in no pair, counted; what is missing at the ends of recordings."""

    pairs: list[Pair] = msgspec.field(default_factory=list)
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    torn: list[str] = msgspec.field(default_factory=list)


def select_pairs(files: Sequence[Path], *, min_gap: float, vocabulary: int) -> PairSelection:
    """Pairs whose rewards differ by more than 0 and by ``min_gap`` or more, of token ids below ``vocabulary``. Raises
    `UserError` for a file that is no recording."""
    found = PairSelection()
    for file in files:
        selection = Selection()
        results = read_results(file, selection)
        actions = read_actions(file, {reference.sequence for result in results for reference in result.actions})
        groups: defaultdict[str, list[tuple[EpisodeFinished, tuple[TrainingSequence, ...]]]] = defaultdict(list)
        for result in results:
            sequences = build_sequences(result, actions, vocabulary)
            if isinstance(sequences, str):
                found.left_out[sequences] += 1
            else:
                groups[result.group_id].append((result, tuple(sequences)))
        for members in groups.values():
            _pair(members, min_gap, found)
        found.torn += selection.torn
    return found


def _pair(members: list[tuple[EpisodeFinished, tuple[TrainingSequence, ...]]], min_gap: float, found: PairSelection) -> None:
    ranked = sorted(members, key=lambda member: (-float(member[0].reward or 0.0), member[0].episode_id))
    for place in range(len(ranked) // 2):
        (better, chosen), (worse, rejected) = ranked[place], ranked[-1 - place]
        gap = float(better.reward or 0.0) - float(worse.reward or 0.0)
        if gap <= 0.0 or gap < min_gap:
            found.left_out["no other of its group is rewarded so much less or more"] += len(ranked) - 2 * place
            return
        found.pairs.append(Pair(chosen=chosen, rejected=rejected))
    found.left_out["its group has an odd number"] += len(ranked) % 2


def count_pairs(pairs: Sequence[Pair]) -> str:
    """In words for a person."""
    leaves = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return f"{len(pairs)} pairs, {leaves} sequences"
