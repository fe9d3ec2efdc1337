"""Rewarded episodes of recordings as sequences for fine-tuning: rejection sampling from what was played. Blocking.

A recording is foreign data: nothing it names is imported or run, and an episode whose numbers do not fit each other is left out
with its reason.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from fleetbus.core.episode.claim_seals import ClaimSeals
from fleetbus.core.episode.segments import SegmentError
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus.recording.reader import RecordingReader
from fleetbus.recording.redaction import is_wiped
from fleetbus_schemas import Action, EpisodeFinished
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.batches import CreditPlan, build_sequence
from fleetbus_workers.learner.leaves import list_leaves, split_sequence


class Selection(msgspec.Struct, kw_only=True):
    """``sequences`` of the episodes that were taken, in the order of their results; why the other graded ones were not,
    counted; ``torn`` what is missing at the ends of recordings."""

    sequences: list[TrainingSequence] = msgspec.field(default_factory=list)
    episodes: int = 0
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    torn: list[str] = msgspec.field(default_factory=list)


def select_rewarded(files: Sequence[Path], *, min_reward: float, per_task: int = 0, vocabulary: int) -> Selection:
    """Training episodes with a reward of at least ``min_reward``, of each task the first ``per_task`` (0: all), whose token ids
    are below ``vocabulary``. Raises `UserError` for a file that is no recording."""
    selection = Selection()
    taken: Counter[str] = Counter()
    for file in files:
        results = read_results(file, selection)
        actions = read_actions(file, {reference.sequence for result in results for reference in result.actions})
        for result in results:
            if result.reward is None or result.reward < min_reward:
                selection.left_out["reward below the threshold"] += 1
            elif per_task and taken[result.task_key] >= per_task:
                selection.left_out["enough episodes of its task"] += 1
            else:
                found = build_sequences(result, actions, vocabulary)
                if isinstance(found, str):
                    selection.left_out[found] += 1
                    continue
                taken[result.task_key] += 1
                selection.episodes += 1
                selection.sequences += found
    return selection


def read_results(file: Path, selection: Selection) -> list[EpisodeFinished]:
    """The graded training episodes of a recording. The first result of an episode counts, be it one that is left out."""
    reader = RecordingReader(file)
    found: dict[str, EpisodeFinished | None] = {}
    seals = ClaimSeals()
    for entry in reader.entries():
        if entry.subject.split(".", 3)[2] == "episode":
            message = decode_episode_entry(entry)
            is_of_claim = seals.enter(message)
            if isinstance(message, EpisodeFinished):
                is_taken = is_of_claim and message.split == "train" and message.reward is not None
                found.setdefault(message.episode_id, message if is_taken else None)
    if reader.torn:
        selection.torn.append(reader.torn)
    return [result for result in found.values() if result is not None]


def read_actions(file: Path, wanted: set[int]) -> dict[int, Action]:
    """The Actions at these positions of a recording."""
    entries = (entry for entry in RecordingReader(file).entries() if entry.sequence in wanted)
    return {entry.sequence: action for entry, action in decode_entries(Action, entries)}


def build_sequences(result: EpisodeFinished, known: dict[int, Action], vocabulary: int) -> list[TrainingSequence] | str:
    """The leaves of an episode, each sampled token with advantage 1; or why it cannot be trained."""
    actions = [known[reference.sequence] for reference in result.actions if reference.sequence in known]
    if not actions or len(actions) < len(result.actions):
        return "actions are not in the recording"
    if any(action.images for action in actions):
        return "it shows images"
    if any(is_wiped(action.prompt_delta) or is_wiped(action.sampled) for action in actions):
        return "it has no token ids: they were redacted, or imported without"
    try:
        whole = build_sequence(result, actions, [1.0] * len(actions), CreditPlan(), 1.0)
        leaves = split_sequence(whole, list_leaves(actions, result.unrewarded_turns))
    except (ValueError, IndexError, SegmentError):
        return "its numbers do not fit each other"
    if any(sequence.loss_mask[:1].any() for sequence in leaves):
        return "its numbers do not fit each other"
    if not np.isfinite(whole.logprobs).all():
        return "its log-probabilities are not finite"
    if not all(((leaf.ids >= 0) & (leaf.ids < vocabulary)).all() for leaf in leaves):
        return "it has tokens that the model does not have"
    return [leaf for leaf in leaves if leaf.loss_mask.any()]
