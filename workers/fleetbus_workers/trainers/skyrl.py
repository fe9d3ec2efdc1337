"""A generator of SkyRL on a run's environments: SkyRL's inference engines sample, environment workers play.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return FleetbusGenerator(cfg.generator, inference_engine_client, tokenizer, url=url, run="r1", tasks="tasks.json")

Rows of the data set name their task by ``task_key``, which SkyRL hands on in ``env_extras``. Needs SkyRL 0.4, of Python 3.12.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any
from uuid import uuid4

import structlog
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, SampledEpisode, Tasks
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded

log = structlog.get_logger()


class FleetbusGenerator(GeneratorInterface):  # type: ignore[misc]
    """An episode that fails is played again, ``retries`` times. Then its row has no token that is trained, and the mean of its
    group's other rewards for its own, so that their advantages keep their mean; without others that of the batch. An episode
    ends where SkyRL's own would, before a prompt of more than ``max_input_length``. Raises `EpisodeExcluded` if no episode of a
    batch was played."""

    def __init__(
        self,
        generator_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        tasks: Tasks,
        url: str = "",
        run: str = "default",
        timeout: float = 600.0,
        retries: int = 2,
    ) -> None:
        self._engines = inference_engine_client
        self._sampling = generator_cfg.sampling_params
        self._source = EpisodeSource.open(
            tokenizer,
            url=url,
            run=run,
            tasks=tasks,
            max_turns=int(generator_cfg.max_turns),
            max_context=int(generator_cfg.max_input_length),
            timeout=timeout,
            retries=retries,
        )

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """One row per prompt, in their order; the prompts' own texts are not used, the environments' are."""
        extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
        keys = [str(extra.get("task_key", "")) for extra in extras]
        rows: list[SampledEpisode | None] = [None] * len(keys)
        reasons: list[EpisodeExcluded] = []

        async def play(index: int) -> None:
            try:
                rows[index] = await self._play(keys[index], input_batch.get("sampling_params"))
            except EpisodeExcluded as excluded:
                log.warning("episode failed; its row is not trained", reason=str(excluded))
                reasons.append(excluded)

        async with open_first_error_task_group() as playing:
            for index in range(len(keys)):
                playing.start_soon(play, index)
        return self._build_output(input_batch, keys, rows, reasons)

    async def _play(self, key: str, sampling_params: dict[str, Any] | None) -> SampledEpisode:
        session = uuid4().hex

        async def sample(ids: list[int]) -> tuple[Sequence[int], Sequence[float] | None]:
            output = await self._engines.generate(
                {"prompt_token_ids": [ids], "session_ids": [session], "sampling_params": sampling_params}
            )
            logprobs = output.get("response_logprobs")
            return output["response_ids"][0], logprobs[0] if logprobs else None

        return await self._source.play(key, sample)

    def _build_output(
        self,
        batch: GeneratorInput,
        keys: Sequence[str],
        rows: Sequence[SampledEpisode | None],
        reasons: Sequence[EpisodeExcluded],
    ) -> GeneratorOutput:
        played = [row for row in rows if row is not None]
        if not played:
            raise EpisodeExcluded(f"no episode of {len(rows)} was played: {reasons[-1] if reasons else 'none was asked for'}")
        named = batch.get("trajectory_ids")
        groups = [each.instance_id for each in named] if named else keys
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for group, row in zip(groups, rows, strict=True):
            if row is not None and row.reward is not None:
                rewards[group].append(row.reward)
        blank = played[0]
        shown = [row or blank for row in rows]
        lengths = [len(row.response_ids) if row is not None else 1 for row in rows]
        given = batch.get("sampling_params")  # without them the engines sample by the configuration's
        logged = (self._sampling.logprobs if given is None else given.get("logprobs")) is not None
        total = fmean([reward for group in rewards.values() for reward in group])
        return {
            "prompt_token_ids": [row.prompt_ids for row in shown],
            "response_ids": [row.response_ids[:length] for row, length in zip(shown, lengths, strict=True)],
            "rewards": [
                fmean(rewards[group] or [total]) if row is None else row.reward for group, row in zip(groups, rows, strict=True)
            ],
            "loss_masks": [[0] if row is None else row.response_mask for row in rows],
            "stop_reasons": ["env_failed" if row is None else row.stop_reason for row in rows],
            "rollout_metrics": {"generate/excluded": float(len(rows) - len(played))},
            "rollout_logprobs": [[0.0] if row is None else row.response_logprobs for row in rows] if logged else None,
            "trajectory_ids": named,
            "rollout_expert_indices": None,
            "is_last_step": None,
        }
