"""Settings that follow the model and the run where the user set none: tokens of a sequence, held-out episodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.assembly.model import find_model_folder

LARGEST_DEFAULT_TOKENS = 8192
"""Models that take more get no more unless a setting says so: memory and time grow with it."""

EVALUATED_SHARE = 10
LEAST_EVALUATED = 32
"""Held-out episodes of one evaluation: one for so many trained ones, but not fewer than this."""

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def fit_run(configuration: Configuration, given: Mapping[str, str]) -> Configuration:
    """The configuration of a run that begins, however its roles are started; settings in ``given`` stay."""
    return fit_evaluation(fit_limits(configuration, given), given)


def fit_limits(configuration: Configuration, given: Mapping[str, str]) -> Configuration:
    """The configuration with the context length of its model, and episodes as long; settings in ``given`` stay.

    The starter policy on its own tasks keeps the defaults, which fit those.
    """
    run = configuration.run
    if not run.model and run.environment == "warehouse":
        return configuration
    context = read_context_length(find_model_folder(run))
    inference, episode = configuration.inference, configuration.episode
    if context and "inference.max_model_len" not in given:
        length = min(context, LARGEST_DEFAULT_TOKENS)
        if "episode.max_episode_tokens" in given:
            length = max(length, episode.max_episode_tokens)
        inference = msgspec.structs.replace(inference, max_model_len=length)
    if "episode.max_episode_tokens" not in given:
        episode = msgspec.structs.replace(episode, max_episode_tokens=inference.max_model_len)
    return msgspec.structs.replace(configuration, inference=inference, episode=episode)


def fit_evaluation(configuration: Configuration, given: Mapping[str, str]) -> Configuration:
    """The configuration with held-out evaluations of at most a tenth of what is trained, where the user did not say how many:
    a trial run of a few steps is not to spend its time on evaluations. Greedy success is measured before, too, where it is
    after: what a policy gains by training alone is seen in both."""
    learner, evaluation = configuration.learner, configuration.evaluation
    if "evaluation.greedy_start" not in given:
        evaluation = msgspec.structs.replace(evaluation, greedy_start=evaluation.greedy)
        configuration = msgspec.structs.replace(configuration, evaluation=evaluation)
    if "evaluation.episodes" in given:
        return configuration
    share = learner.steps * learner.groups * learner.group_size // EVALUATED_SHARE
    episodes = min(evaluation.episodes, max(share, LEAST_EVALUATED))
    return msgspec.structs.replace(configuration, evaluation=msgspec.structs.replace(evaluation, episodes=episodes))


def read_context_length(folder: Path) -> int:
    """Number of tokens that a model takes by its ``config.json``; 0 if that does not say."""
    try:
        content = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        return 0
    return find_context_length(content) if isinstance(content, dict) else 0


def find_context_length(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    places = (config, nested) if isinstance(nested, dict) else (config,)
    found = [place[key] for place in places for key in _CONTEXT_KEYS if isinstance(place.get(key), int)]
    return max(found, default=0)
