"""An agent executor of OpenRLHF on a run's environments: OpenRLHF's engines sample, environment workers play.

The file that ``--train.agent_func_path`` names says:

    from fleetbus_workers.trainers.openrlhf import AgentExecutor

The prompt's label is the key of its task; FLEETBUS_NATS_URL, FLEETBUS_RUN_NAME and FLEETBUS_RUN_TASKS say where it is played.
Needs OpenRLHF 0.11.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import structlog
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from fleetbus.errors import UserError
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, SampledEpisode
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded

log = structlog.get_logger()

RETRIES = 2

_source: ContextVar[EpisodeSource] = ContextVar("source")
_episode: ContextVar[SampledEpisode | None] = ContextVar("episode")


class FleetbusAgent(AgentInstanceBase):  # type: ignore[misc]
    """One episode, in the texts that its ids stand for: OpenRLHF tokenises what an environment says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._source = _source.get()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """``observation``: the environment's prompt, in the chat template; the given one is not used."""
        self._episode = self._source.episode(str(states["label"]))
        _episode.set(self._episode)
        return states | {"observation": self._episode.template.decode(await self._episode.begin())}

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """``rewards``: the turn's, a tensor; ``environment_feedback``: up to where the policy speaks again; ``done``."""
        template, episode = self._episode.template, self._episode
        ids = template.encode(state_dict["action_text"])
        if not ids or ids[-1] not in template.stop_ids:
            ids.append(template.turn_end)  # it was sampled, and OpenRLHF's engines leave it out of the text
        start = len(episode.response_ids) + len(ids)
        await episode.step(ids)
        return {
            "rewards": torch.tensor(episode.turn_rewards[-1]),
            "environment_feedback": template.decode(episode.response_ids[start:]),
            "done": episode.is_over,
            "extra_logs": {"turns": torch.tensor(float(len(episode.turn_rewards)))},
        }


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    """An episode that fails is played again, `RETRIES` times; then `EpisodeExcluded` is raised, which ends OpenRLHF's step: a
    sample has to have a reward. One whose tokens are used up has its verdict, too."""

    def __init__(self) -> None:
        super().__init__(FleetbusAgent)

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One sample. Raises `EpisodeExcluded`, and `UserError` for a label that is no task."""
        if images:
            raise UserError("images of a data set are not shown: an environment says what its policy sees")
        _source.set(_open_source(hf_tokenizer))
        for left in reversed(range(1 + RETRIES)):
            _episode.set(None)
            try:
                response = await super().execute(prompt, label, deepcopy(sampling_params), max_length, hf_tokenizer, llm_engine)
                if (episode := _episode.get()) is not None and not episode.is_over and episode.turn_rewards:
                    response["reward"] = response["scores"] = await episode.grade()
                return dict(response)
            except EpisodeExcluded as excluded:
                if not left:
                    raise
                log.warning("episode failed; playing another", task=label, reason=str(excluded))
            finally:
                if (episode := _episode.get()) is not None:
                    await episode.close()
        raise AssertionError("unreachable")


def _open_source(tokenizer: Any) -> EpisodeSource:
    run, tasks = os.environ.get("FLEETBUS_RUN_NAME", "default"), os.environ.get("FLEETBUS_RUN_TASKS", "")
    if not tasks:
        raise UserError("FLEETBUS_RUN_TASKS is to name the file of the tasks")
    return EpisodeSource.open(tokenizer, run=run, tasks=tasks, max_turns=2**31)
