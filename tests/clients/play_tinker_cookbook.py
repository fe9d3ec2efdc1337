"""tinker-cookbook's own group rollouts on environments under faults, for a Python with it and fleetbus:
``play_tinker_cookbook.py FACTS``; see `test_trainers.py`. What stands in is the sampling client.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import tinker
from scripted_policy import STARTER, open_tokenizer, sample, tell
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from fleetbus_workers.trainers.tinker_cookbook import FleetbusDatasetBuilder


class Policy(TokenCompleter):
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        ids, logprobs = sample(self._tokenizer, model_input.to_ints())
        assert ids[-1] in stop
        return TokensWithLogprobs(tokens=ids, maybe_logprobs=logprobs)


async def play(facts: dict[str, Any]) -> None:
    tokenizer = open_tokenizer()
    builder = FleetbusDatasetBuilder(
        model_name=str(STARTER), tasks=facts["tasks"], url=facts["url"], run=facts["run"], group_size=facts["parallel"]
    )
    dataset, _ = await builder()
    assert len(dataset) == 1
    enough, played = Path(facts["enough"]), 0
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        (group_builder,) = pickle.loads(pickle.dumps(dataset.get_batch(0)))
        group = await do_group_rollout(group_builder, Policy(tokenizer), strategy=RetryOnFailure())
        assert group is not None and not group.rollout_errors
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            (datum,) = trajectory_to_data(trajectory, 0.5)
            columns = {name: column.to_torch().tolist() for name, column in datum.loss_fn_inputs.items()}
            start = columns["mask"].index(1.0)
            mask = [int(own) for own in columns["mask"][start:]]
            tell(tokenizer, columns["target_tokens"][start:], mask, columns["logprobs"][start:], reward)
            played += 1
        assert trajectory.stop_reason == "completed"


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
