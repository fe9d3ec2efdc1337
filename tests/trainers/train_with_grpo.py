"""Trains on a run's episodes with TRL's `GRPOTrainer`, unmodified.

    python tests/trainers/train_with_grpo.py MODEL OUTPUT_FOLDER STEPS

Where the run is and what it plays is said by FLEETBUS_* variables. What the reward function was given is written to
OUTPUT_FOLDER/trained.jsonl, a line per step's batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from fleetbus_workers.trainers.trl_rollout_func import FleetbusRollouts


def main(model: str, output: Path, steps: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    rollouts = FleetbusRollouts()

    def write_down(completions: list[Any], episode_reward: list[float | None], trainer_state: Any, **_: Any) -> list[Any]:
        with (output / "trained.jsonl").open("a") as file:
            line = {"step": trainer_state.global_step + 1, "rewards": episode_reward, "excluded": dict(rollouts.excluded)}
            file.write(json.dumps(line) + "\n")
        return rollouts.reward(completions, episode_reward)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=write_down,
        rollout_func=rollouts,
        train_dataset=rollouts.dataset,
        args=GRPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=8,
            num_generations=4,
            max_steps=steps,
            learning_rate=3e-4,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    (output / "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
