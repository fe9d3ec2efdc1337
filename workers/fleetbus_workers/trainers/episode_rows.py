"""Episodes as rows of TRL's `GRPOTrainer`: one per prompt, whatever came of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleetbus.client.rollouts import Episode


def find_row_problem(episode: Episode, vocabulary: float) -> str:
    """The reason for which an episode is no row of a trainer whose model has so many token ids; empty if it is one."""
    if episode.reward is None:
        return episode.error or "it has no reward"
    if len(episode.sequences) > 1:
        return f"it has {len(episode.sequences)} sequences, and a row takes one: TrlRollouts makes several"
    if not any(True in sequence.loss_mask for sequence in episode.sequences):
        return "it has no token that is trained"  # TRL takes no empty completion
    if (highest := max(max(sequence.ids, default=0) for sequence in episode.sequences)) >= vocabulary:
        return f"token id {highest} is not below {vocabulary}"  # it ends a trainer
    return ""


def find_vocabulary(trainer: Any) -> float:
    """The number of token ids that the trainer's model has, by its configuration; infinity where that does not say it."""
    configuration: Any = getattr(getattr(trainer, "model", None), "config", None)
    if hasattr(configuration, "get_text_config"):  # of a model that reads images, too
        configuration = configuration.get_text_config()
    return getattr(configuration, "vocab_size", None) or math.inf


def spread_rows(rows: Sequence[Episode | None], values: Sequence[Any], name: str) -> list[Any]:
    """A value per row. An episode that failed has one token of another row, which is not trained, and no reward."""
    left = iter(values)
    blank = {"env_mask": [0], "logprobs": [0.0], "episode_reward": None}
    return [(blank[name] if name in blank else values[0][:1]) if row is None else next(left) for row in rows]
