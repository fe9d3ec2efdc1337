"""Tokens per second of the torch trainer beside TRL's `GRPOTrainer` on the same batches, in one process.

    .venv-trl/bin/python benchmarks/trainer_beside_trl.py --json     # the environment of `just test-trl`

TRL's own `training_step` is run as it is (its loss, its fused head, accelerate's backward), then clipping and AdamW as its
loop has them; only sampling is left out: a prepared batch comes where it would generate. Both compute in float32 on the same
threads, without recomputing activations, the same sequences per forward pass. Tokens are those of the sequences, padding not
counted. Rounds of both take turns; ``ratio`` is the median over rounds of ours over TRL's, ``cpu_ratio`` the same in CPU time,
which other processes do not disturb; ``loss_gap`` is between the losses of the first round, which have to be the same.

Batches: `alone` has a prompt of its own per sequence; in `task` all begin with the same system prompt, as episodes of a run do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.simplefilter("ignore")

import msgspec
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from trl import GRPOConfig, GRPOTrainer

from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, TrainerSettings
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer

STARTER = Path(__file__).resolve().parent.parent / "workers/fleetbus_workers/starter/policy"
SEQUENCES, PROMPT_TOKENS, TURN_TOKENS, ROUNDS = 16, 60, 40, 5
SAME_LOSS = 1e-6
MODELS = ((128, 4, 512), (256, 4, 512), (128, 4, 32_768))
"""Width, layers, vocabulary."""


def make_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_batch(kind: str, vocabulary: int) -> list[TrainingSequence]:
    """Episodes of one to three turns: a prompt, then sampled tokens and observations in turn."""
    draw = np.random.default_rng(0)
    system = draw.integers(3, vocabulary, PROMPT_TOKENS)
    batch = []
    for index in range(SEQUENCES):
        turns = int(draw.integers(1, 4))
        ids = draw.integers(3, vocabulary, PROMPT_TOKENS + 2 * TURN_TOKENS * turns).astype(np.int32)
        if kind == "task":
            ids[: PROMPT_TOKENS - 10] = system[: PROMPT_TOKENS - 10]
        mask = (np.arange(len(ids)) >= PROMPT_TOKENS) & ((np.arange(len(ids)) - PROMPT_TOKENS) // TURN_TOKENS % 2 == 0)
        batch.append(
            TrainingSequence(
                episode_id=f"e{index}", group_id="g", ids=ids, loss_mask=mask,
                logprobs=np.where(mask, -6.0, 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )  # fmt: skip
    return batch


def build_inputs(batch: list[TrainingSequence]) -> dict[str, torch.Tensor]:
    """The batch as TRL has it after sampling: completions with observations of tools in them, padded at their end."""
    longest = max(len(sequence.ids) for sequence in batch) - PROMPT_TOKENS
    prompts, completions, lengths, sampled = (
        np.zeros((len(batch), width), np.int64) for width in (PROMPT_TOKENS, *[longest] * 3)
    )
    for row, sequence in enumerate(batch):
        count = len(sequence.ids) - PROMPT_TOKENS
        prompts[row] = sequence.ids[:PROMPT_TOKENS]
        completions[row, :count] = sequence.ids[PROMPT_TOKENS:]
        lengths[row, :count] = 1
        sampled[row, :count] = sequence.loss_mask[PROMPT_TOKENS:]
    arrays = {"prompt_ids": prompts, "completion_ids": completions, "completion_mask": lengths, "tool_mask": sampled}
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    advantages = torch.tensor([float(sequence.advantages[sequence.loss_mask][0]) for sequence in batch])
    total = torch.tensor(float(sampled.sum()))
    return inputs | {
        "prompt_mask": torch.ones_like(inputs["prompt_ids"]),
        "advantages": advantages,
        "num_items_in_batch": total,
    }


def build_trl_step(folder: Path, scratch: Path, batch: list[TrainingSequence]) -> Callable[[], float]:
    arguments = GRPOConfig(
        output_dir=str(scratch), per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES // 2, use_cpu=True,
        report_to=[], bf16=False, gradient_checkpointing=False, learning_rate=3e-4, max_grad_norm=0.1, loss_type="dapo",
        epsilon=0.2, epsilon_high=0.28, beta=0.0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dataset = Dataset.from_dict({"prompt": ["one", "two"]})

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = GRPOTrainer(
        model=str(folder), reward_funcs=reward, args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.create_optimizer()
    inputs = build_inputs(batch)
    trainer._prepare_inputs = lambda _: inputs
    trainer.current_gradient_accumulation_steps = 1

    def step() -> float:
        loss = trainer.training_step(trainer.model, inputs, None)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), arguments.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(loss)

    return step


def build_our_step(folder: Path, batch: list[TrainingSequence], *, packed: bool) -> Callable[[], float]:
    table = TrainerSettings(packing=True, token_budget=1024) if packed else TrainerSettings()
    settings = TorchTrainerSettings(
        learner=LearnerSettings(micro_batch_size=SEQUENCES, warmup_steps=0),
        algorithm=AlgorithmSettings(old_policy="trainer", reduction="token_mean"),  # that of TRL's "dapo"
        trainer=table,
    )
    trainer = TorchTrainer(folder, settings=settings)
    return lambda: trainer.train(batch, version=0, progress=0.0)["loss"]


def measure(model: tuple[int, int, int], kind: str, *, packed: bool, rounds: int) -> dict[str, Any]:
    batch = make_batch(kind, model[2])
    tokens = sum(len(sequence.ids) for sequence in batch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(folder, *model)
        sides = (build_trl_step(folder, Path(scratch) / "trl", batch), build_our_step(folder, batch, packed=packed))
        torch.set_num_threads(1)
        seconds: tuple[list[float], list[float]] = ([], [])
        cpu: tuple[list[float], list[float]] = ([], [])
        losses = []
        for _ in range(rounds + 1):
            for side, step in enumerate(sides):
                started, started_cpu = time.perf_counter(), time.process_time()
                losses.append(step())
                seconds[side].append(time.perf_counter() - started)
                cpu[side].append(time.process_time() - started_cpu)
    if (gap := abs(losses[0] - losses[1])) > SAME_LOSS:
        raise SystemExit(f"the losses of the first round differ by {gap:.2g}: both sides have to compute the same")
    theirs, ours = (statistics.median(found[1:]) for found in seconds)
    return {
        "width": model[0], "layers": model[1], "vocabulary": model[2], "batch": kind, "packed": packed, "tokens": tokens,
        "trl_tokens_per_second": round(tokens / theirs, 1),
        "our_tokens_per_second": round(tokens / ours, 1),
        "ratio": round(statistics.median(a / b for a, b in zip(seconds[0][1:], seconds[1][1:], strict=True)), 3),
        "cpu_ratio": round(statistics.median(a / b for a, b in zip(cpu[0][1:], cpu[1][1:], strict=True)), 3),
        "loss_gap": gap,
    }  # fmt: skip


def main(as_json: bool, rounds: int) -> None:
    for model in MODELS:
        for kind, packed in (("alone", False), ("task", False), ("alone", True)):
            row = measure(model, kind, packed=packed, rounds=rounds)
            print(msgspec.json.encode(row).decode() if as_json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    main(given.json, given.rounds)
