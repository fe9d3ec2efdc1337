"""Trains a run with TRL's `AsyncGRPOTrainer`, unmodified but for what asks a GPU: its attention kernel, and its name.

    python -m tests.trainers.train_with_trl MODEL OUTPUT_FOLDER [--steps N] [--processes-step N]

Where the run is and what it plays is said by FLEETBUS_* variables. What TRL trained is written to OUTPUT_FOLDER/trained.jsonl:
of each optimizer step its number and the groups in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from fleetbus_workers.trainers.trl import TrlRollouts


class CpuKernel:
    """What is used of flash-attn 3: attention over segments of one row, each causal and aligned at its end."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        longest_query: int,
        longest_key: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert causal and window_size == (-1, -1)
        parts = []
        for segment in range(len(query_ends) - 1):
            own = query[query_ends[segment] : query_ends[segment + 1]].transpose(0, 1)
            keys = key[key_ends[segment] : key_ends[segment + 1]].transpose(0, 1)
            values = value[key_ends[segment] : key_ends[segment + 1]].transpose(0, 1)
            seen = torch.ones(own.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - own.shape[1])
            part = torch.nn.functional.scaled_dot_product_attention(
                own[None], keys[None], values[None], attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)


class Journal(TrainerCallback):  # type: ignore[misc]
    """Writes down which groups each optimizer step trained; what is taken ahead is of the next one."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._file.open("a") as output:
            output.write(json.dumps({"step": state.global_step}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    chosen = parser.parse_args()
    packing._flash_attn = CpuKernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    rollouts = TrlRollouts()
    trainer = AsyncGRPOTrainer(
        model=chosen.model,
        args=AsyncGRPOConfig(
            output_dir=str(chosen.output),
            max_steps=10_000,
            token_budget=0,
            per_device_train_batch_size=chosen.rows,
            gradient_accumulation_steps=chosen.accumulate,
            learning_rate=3e-4,
            save_strategy="no",
            save_total_limit=3,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rollouts.dataset,
        rollout_worker=rollouts,
        weight_transfer=rollouts.weight_transfer,
        callbacks=[Journal(chosen.output / "trained.jsonl")],
    )
    rollouts.attach(trainer)
    chosen.output.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=rollouts.find_checkpoint())


if __name__ == "__main__":
    main()
