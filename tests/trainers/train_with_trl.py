"""Trains a run with TRL's `AsyncGRPOTrainer`, unmodified but for what asks a GPU: its attention kernel, and its name.

    python tests/trainers/train_with_trl.py MODEL OUTPUT_FOLDER [--rows N] [--accumulate N]

Where the run is and what it plays is said by FLEETBUS_* variables. What TRL trained is written to OUTPUT_FOLDER/trained.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from fleetbus_workers.trainers.rows import Row
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


class RecordingRollouts(TrlRollouts):
    """Notes of each row that TRL takes whose it is, in their order; empty for a filler."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def convert(self, row: Row) -> Any:
        self.taken.append("" if row.is_filler else row.episode_id)
        return super().convert(row)


class Journal(TrainerCallback):  # type: ignore[misc]
    """Writes down which episodes each optimizer step trained: so many rows after those of the step before. What is taken ahead
    is of the next one."""

    def __init__(self, file: Path, rollouts: RecordingRollouts, rows: int) -> None:
        self._file, self._rollouts, self._rows = file, rollouts, rows
        self._began = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        start = (state.global_step - self._began - 1) * self._rows
        episodes = sorted({*self._rollouts.taken[start : start + self._rows]} - {""})
        line = {"process": os.getpid(), "began": self._began, "step": state.global_step, "episodes": episodes}
        with self._file.open("a") as output:
            output.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    chosen = parser.parse_args()
    packing._flash_attn = CpuKernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    rollouts = RecordingRollouts()
    chosen.output.mkdir(parents=True, exist_ok=True)
    rows = chosen.rows * chosen.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
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
            save_total_limit=4,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rollouts.dataset,
        rollout_worker=rollouts,
        weight_transfer=rollouts.weight_transfer,
        callbacks=[Journal(chosen.output / "trained.jsonl", rollouts, rows)],
    )
    rollouts.attach(trainer)
    trainer.train(resume_from_checkpoint=rollouts.find_checkpoint())


if __name__ == "__main__":
    main()
