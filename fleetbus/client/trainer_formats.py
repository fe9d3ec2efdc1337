"""Episodes in the shapes of other trainers. Pure: no import of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetbus.client.rollouts import Episode


def convert_to_trl(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Convert to what a ``rollout_func`` of TRL's `GRPOTrainer` returns (trl 1.16): a list per key, one entry per episode.

    ``env_mask`` is 1 for the policy's own tokens; log-probabilities cover the completion, 0.0 where the mask is 0.
    ``episode_reward`` goes to reward functions, which only have to hand it on. Raises `ValueError` for an episode without a
    reward: ask for another group instead of training on a zero; and for one of several sequences, for which there is no place.
    """
    ungraded = [episode.episode_id for episode in episodes if episode.reward is None or not episode.sequences]
    if ungraded:
        raise ValueError(f"episodes without a reward cannot be trained: {', '.join(ungraded)}")
    return {
        "prompt_ids": [list(episode.ids[: episode.prompt_tokens]) for episode in episodes],
        "completion_ids": [list(episode.ids[episode.prompt_tokens :]) for episode in episodes],
        "logprobs": [list(episode.logprobs[episode.prompt_tokens :]) for episode in episodes],
        "env_mask": [[int(own) for own in episode.loss_mask[episode.prompt_tokens :]] for episode in episodes],
        "episode_reward": [episode.reward for episode in episodes],
    }


def convert_to_verl(episode: Episode) -> dict[str, Any]:
    """The fields of verl's ``AgentLoopOutput`` but for its metrics. Raises `ValueError` for an episode without a reward."""
    (shaped,) = zip(*convert_to_trl([episode]).values(), strict=True)
    prompt_ids, response_ids, logprobs, mask, reward = shaped
    return {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response_mask": mask,
        "response_logprobs": logprobs,
        "reward_score": reward,
        "num_turns": 2 * len(episode.texts),
    }
