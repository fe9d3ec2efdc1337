"""Tokens per second of the torch trainer beside a bare loop of forward, backward and step, on the same packed batches.

    python benchmarks/trainer_tokens.py --json

The bare loop is what one writes by hand: the model on packed rows, logits of every place, log-softmax, the policy gradient's
loss on sampled tokens, backward, clipping, AdamW. The trainer does what it does in a run: batches packed anew, the clipped
objective, metrics, schedule. Rounds of both take turns; ``ratio`` is the median over rounds of trainer over bare,
``cpu_ratio`` the same in CPU time, which other processes do not disturb.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fleetbus.config.settings import TrainerSettings
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.batches import MicroBatch, split_micro_batches
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer

VOCABULARY = 512
SEQUENCES = 16
PROMPT_TOKENS = 60
TURN_TOKENS = 40
BUDGET = 512
ROUNDS = 5


def make_model(folder: Path, width: int, layers: int) -> None:
    """A Qwen3 with random weights; 256 wide and 4 layers deep it has 3.6 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_batch() -> list[TrainingSequence]:
    """Episodes of one to three turns: a prompt, then sampled tokens and observations in turn."""
    draw = np.random.default_rng(0)
    batch = []
    for index in range(SEQUENCES):
        turns = int(draw.integers(1, 4))
        ids = draw.integers(3, VOCABULARY, PROMPT_TOKENS + 2 * TURN_TOKENS * turns).astype(np.int32)
        mask = (np.arange(len(ids)) >= PROMPT_TOKENS) & ((np.arange(len(ids)) - PROMPT_TOKENS) // TURN_TOKENS % 2 == 0)
        batch.append(
            TrainingSequence(
                episode_id=f"e{index}",
                group_id="g",
                ids=ids,
                loss_mask=mask,
                logprobs=np.where(mask, -6.0, 0).astype(np.float32),
                advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return batch


def bare_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[MicroBatch], batch: list[TrainingSequence]
) -> None:
    """One optimizer step over rows that were packed beforehand."""
    sampled = sum(int(sequence.loss_mask.sum()) for sequence in batch)
    for row in rows:
        logits = model(input_ids=row.ids, position_ids=row.positions, use_cache=False).logits
        everywhere = torch.log_softmax(logits.float(), -1)
        logprobs = everywhere[row.rows, row.columns].gather(-1, row.targets[:, None])[:, 0]
        advantages = np.concatenate([batch[index].advantages[batch[index].loss_mask] for index in row.indices])
        (-(logprobs * torch.from_numpy(advantages)).sum() / sampled).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(width: int, layers: int) -> dict[str, float]:
    batch = make_batch()
    ids, masks = [sequence.ids for sequence in batch], [sequence.loss_mask for sequence in batch]
    rows = list(split_micro_batches(ids, masks, prefix=0, size=SEQUENCES, budget=BUDGET, packing=True))
    tokens = sum(row.ids.numel() for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), width, layers)
        settings = TorchTrainerSettings(trainer=TrainerSettings(packing=True, token_budget=BUDGET))
        trainer = TorchTrainer(Path(scratch), settings=settings)
        model = AutoModelForCausalLM.from_pretrained(scratch).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    bare: list[float] = []
    ours: list[float] = []
    cpu: list[float] = []
    for _ in range(ROUNDS + 1):
        started, started_cpu = time.perf_counter(), time.process_time()
        bare_step(model, optimizer, rows, batch)
        between, between_cpu = time.perf_counter(), time.process_time()
        trainer.train(batch, version=0, progress=0.0)
        bare.append(tokens / (between - started))
        ours.append(tokens / (time.perf_counter() - between))
        cpu.append((between_cpu - started_cpu) / (time.process_time() - between_cpu))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": tokens,
        "rows": len(rows),
        "trainer_tokens_per_second": round(statistics.median(ours[1:]), 1),
        "bare_tokens_per_second": round(statistics.median(bare[1:]), 1),
        "ratio": round(statistics.median(one / other for one, other in zip(ours[1:], bare[1:], strict=True)), 3),
        "cpu_ratio": round(statistics.median(cpu[1:]), 3),
    }


def main(as_json: bool) -> None:
    for width, layers in ((128, 4), (256, 4)):
        row = measure(width, layers)
        print(msgspec.json.encode(row).decode() if as_json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    main(parser.parse_args().json)
