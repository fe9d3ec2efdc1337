"""verl's own `AgentLoopWorker` on environments under faults, for a Python with verl and fleetbus: ``play_verl.py FACTS``; see
`test_trainers.py`. What stands in is the server that samples.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from scripted_policy import STARTER, open_tokenizer, sample, tell
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput


class Servers:
    """What an agent loop uses of ``LLMServerClient``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        ids, logprobs = sample(self._tokenizer, prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed")


def build_config(facts: dict[str, Any]) -> Any:
    loops = Path(facts["folder"]) / "loops.yaml"
    loop = {
        "name": "fleetbus",
        "_target_": "fleetbus_workers.trainers.verl.FleetbusAgentLoop",
        "url": facts["url"],
        "run": facts["run"],
        "tasks": facts["tasks"],
    }
    loops.write_text(json.dumps([loop]))
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={STARTER}",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.prompt_length=256",
                "actor_rollout_ref.rollout.response_length=2048",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.multi_turn.enable=true",
            ],
        )


async def play(facts: dict[str, Any]) -> None:
    tokenizer = open_tokenizer()
    worker = AgentLoopWorker(build_config(facts), Servers(tokenizer))
    enough, played = Path(facts["enough"]), 0
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        count = facts["parallel"]
        columns: dict[str, list[Any]] = {
            "raw_prompt": [[{"role": "user", "content": "unused"}]] * count,
            "agent_name": ["fleetbus"] * count,
            "task_key": ["t"] * count,
        }
        arrays = {name: np.fromiter(values, dtype="O", count=count) for name, values in columns.items()}
        output = await worker.generate_sequences(DataProto(non_tensor_batch=arrays, meta_info={"global_steps": played}))
        played += count
        for row in range(count):
            length = int(output.batch["attention_mask"][row, -output.batch["responses"].shape[1] :].sum())
            tell(
                tokenizer,
                output.batch["responses"][row, :length].tolist(),
                output.batch["response_mask"][row, :length].tolist(),
                output.batch["rollout_log_probs"][row, :length].tolist(),
                float(output.batch["rm_scores"][row].sum()),
            )


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
