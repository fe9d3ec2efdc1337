"""An agent loop of verl on a run's environments: verl's own servers sample, environment workers play.

In the file that ``actor_rollout_ref.rollout.agent.agent_loop_config_path`` names:

    - name: fleetbus
      _target_: fleetbus_workers.trainers.verl.FleetbusAgentLoop
      url: nats://host:4222
      run: r1
      tasks: /data/tasks.json

and ``agent_name: fleetbus`` and a ``task_key`` in the data set's rows, or the latter in their ``extra_info``. Why verl samples:
docs/decisions/0273-other-trainers-sample-themselves.md. Needs verl 0.9.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from fleetbus.errors import UserError
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, Tasks

MAX_TURNS = 50
"""Where ``multi_turn.max_assistant_turns`` says none."""


class FleetbusAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Registered by the name in that file: verl's decorator would take the file's settings away when this module is imported.

    Turns and tokens are bounded by ``multi_turn.max_assistant_turns`` and ``response_length``. An episode that fails is
    played again, ``retries`` times; then `EpisodeExcluded` is raised, which ends the step of verl: each row has to have a
    reward, and one that is masked would still count in its group's mean."""

    def __init__(
        self,
        *args: Any,
        tasks: Tasks,
        url: str = "",
        run: str = "default",
        timeout: float = 600.0,
        retries: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._length, self._longest = int(self.rollout_config.response_length), int(self.rollout_config.prompt_length)
        self._source = EpisodeSource.open(
            self.tokenizer,
            url=url,
            run=run,
            tasks=tasks,
            max_turns=int(self.rollout_config.multi_turn.max_assistant_turns or MAX_TURNS),
            max_tokens=self._length,
            timeout=timeout,
            retries=retries,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """One row: the episode of the task that ``task_key`` names. Raises `EpisodeExcluded`, and `UserError` for no task."""
        key = str(kwargs.get("task_key") or (kwargs.get("extra_info") or {}).get("task_key", ""))
        if not key:
            raise UserError("a row names no task: put a task_key into the data set's rows, or into their extra_info")
        request, began, sampling_seconds, preempted = uuid4().hex, time.monotonic(), 0.0, -1
        extra_fields: dict[str, Any] = {}

        async def sample(ids: list[int]) -> tuple[Sequence[int], Sequence[float] | None]:
            nonlocal sampling_seconds, preempted
            if not sampling_seconds and len(ids) > self._longest:
                raise UserError(f"task {key} begins with {len(ids)} tokens, and data.max_prompt_length is {self._longest}")
            start = time.monotonic()
            output = await self.server_manager.generate(
                request_id=request, prompt_ids=ids, sampling_params=dict(sampling_params)
            )
            sampling_seconds += time.monotonic() - start
            preempted = max(preempted, -1 if output.num_preempted is None else output.num_preempted)
            names = ("max_global_steps",) if extra_fields else tuple(output.extra_fields)  # the first version and the last
            extra_fields.update({name: output.extra_fields[name] for name in names if name in output.extra_fields})
            return output.token_ids, output.log_probs

        episode = await self._source.play(key, sample)
        return AgentLoopOutput(
            prompt_ids=episode.prompt_ids,
            response_ids=episode.response_ids[: self._length],
            response_mask=episode.response_mask[: self._length],
            response_logprobs=episode.response_logprobs[: self._length] if sampling_params.get("logprobs") else None,
            reward_score=episode.reward,
            num_turns=2 * len(episode.turn_rewards) + 1,
            metrics={
                "generate_sequences": sampling_seconds,
                "tool_calls": time.monotonic() - began - sampling_seconds,
                "num_preempted": preempted,
            },
            extra_fields=extra_fields | {"turn_scores": episode.turn_rewards, "tool_rewards": []},
        )
