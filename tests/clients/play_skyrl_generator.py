"""The generator for SkyRL on environments under faults, its rows checked by SkyRL's own validation, for a Python with SkyRL and
fleetbus: ``play_skyrl_generator.py FACTS``; see `test_trainers.py`. What stands in are the inference engines.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_policy import open_tokenizer, sample, tell
from skyrl.train.generators.base import GeneratorInterface, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output

from fleetbus_workers.trainers.skyrl import FleetbusGenerator


class Engines:
    """What a generator uses of ``InferenceEngineInterface``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        sampled = [sample(self._tokenizer, ids) for ids in input_batch["prompt_token_ids"]]
        return {
            "responses": [self._tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in sampled],
            "response_ids": [ids for ids, _ in sampled],
            "response_logprobs": [logprobs for _, logprobs in sampled],
            "stop_reasons": ["stop"] * len(sampled),
        }


async def play(facts: dict[str, Any]) -> None:
    tokenizer = open_tokenizer()
    sampling = SimpleNamespace(max_generate_length=64, logprobs=1)
    config = SimpleNamespace(max_turns=50, max_input_length=4096, sampling_params=sampling)
    names = ("url", "run", "tasks")
    generator: GeneratorInterface = FleetbusGenerator(
        config, Engines(tokenizer), tokenizer, **{name: facts[name] for name in names}
    )
    enough, played, count = Path(facts["enough"]), 0, facts["parallel"]
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        output = await generator.generate(
            {
                "prompts": [[{"role": "user", "content": "unused"}]] * count,
                "env_classes": ["fleetbus"] * count,
                "env_extras": [{"task_key": "t"}] * count,
                "sampling_params": {"logprobs": 1},
                "trajectory_ids": [TrajectoryID(instance_id="t", repetition_id=index) for index in range(count)],
                "batch_metadata": None,
            }
        )
        validate_generator_output(count, output)
        assert output["rollout_metrics"] == {"generate/excluded": 0.0}
        columns = (output["response_ids"], output["loss_masks"], output["rollout_logprobs"], output["rewards"])
        for ids, mask, logprobs, reward in zip(*columns, strict=True):
            tell(tokenizer, ids, mask, logprobs, reward)
            played += 1


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
