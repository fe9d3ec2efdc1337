"""A GPU with real memory: what engine torch samples and the torch trainer trains on it, beside plain transformers.

    python benchmarks/one_gpu.py engine 135M 0.6B
    python benchmarks/one_gpu.py trainer 0.6B 1.7B

Random weights in the shapes of SmolLM2-135M, Qwen3-0.6B and Qwen3-1.7B. JSON lines. ``engine``: sampled tokens per second of
so many rows at a time, prompts of 128 tokens and 128 tokens sampled, beside `generate` of transformers on the same prompts in
the same type; ``ratio`` is ours over theirs. ``trainer``: one step of 64 sequences of 1,024 tokens, of which 512 are sampled,
with the settings that a model of yours gets on a GPU, the memory that torch gave out at most in each part beside what
`fleetbus plan` computes, and ``mfu``: 6 operations per weight and token, and attention, over the peak of an H100 (989 TFLOP/s
in bfloat16). ``plain`` is a loop of transformers' forward call with the same precision, recomputation, sequences per pass and
fused AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory_plan import draw_batch
from fleetbus.config.profile import apply_profile
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.up.memory import plan_learner, read_shape

QWEN: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "num_hidden_layers": 28}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("qwen3", {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
                       "head_dim": 32, "vocab_size": 512, "num_hidden_layers": 2}),
    "135M": ("llama", {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
                       "vocab_size": 49_152, "num_hidden_layers": 30}),
    "0.6B": ("qwen3", {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, **QWEN}),
    "1.7B": ("qwen3", {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, **QWEN}),
}  # fmt: skip
PEAK_FLOPS = 989e12
PROMPT_TOKENS = SAMPLED_TOKENS = 128
SEQUENCES, SEQUENCE_TOKENS = 64, 1024


def make_model(folder: Path, name: str) -> Path:
    kind, sizes = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **sizes, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=2, bos_token_id=1
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder)
    return folder


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_call(act: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - started


def draw_prompts(vocabulary: int, rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(3, vocabulary, (rows, PROMPT_TOKENS))


async def sample(sampler: TorchSampler, prompts: np.ndarray[Any, Any], tokens: int) -> None:
    async with sampler.run(), anyio.create_task_group() as tasks:
        for row, ids in enumerate(prompts.tolist()):
            request = GenerationRequest(
                cache_key=f"e{row}", ids=ids, sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=tokens, seed=row
            )
            tasks.start_soon(sampler.generate, request)


def measure_engine(folder: Path, name: str, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    vocabulary = SHAPES[name][1]["vocab_size"]
    prompts, found = draw_prompts(vocabulary, rows), {}
    sampler = TorchSampler(folder, slots=rows, max_model_len=512, device=DEVICE, dtype=dtype, cached_histories=0)
    anyio.run(sample, sampler, prompts, 8)
    found["ours"] = rows * SAMPLED_TOKENS / time_call(partial(anyio.run, sample, sampler, prompts, SAMPLED_TOKENS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    ids = torch.from_numpy(prompts).to(DEVICE)
    mask = torch.ones_like(ids)
    generate = partial(model.generate, ids, attention_mask=mask, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        generate(max_new_tokens=8)
        found["plain"] = rows * SAMPLED_TOKENS / time_call(lambda: generate(max_new_tokens=SAMPLED_TOKENS))
    tokens = {f"{key}_tokens_per_second": round(value) for key, value in found.items()}
    return {"rows": rows, "dtype": str(dtype)[6:], **tokens, "ratio": round(found["ours"] / found["plain"], 2)}


def build_plain_step(folder: Path, batch: list[TrainingSequence], budget: int) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=DEVICE == "cuda")
    rows = max(budget // len(batch[0].ids), 1)

    def step() -> None:
        for first in range(0, len(batch), rows):
            part = batch[first : first + rows]
            ids = torch.from_numpy(np.stack([each.ids for each in part]).astype(np.int64)).to(DEVICE)
            kept = int(part[0].loss_mask.sum()) + 1
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(ids, use_cache=False, logits_to_keep=kept).logits[:, :-1]
            chosen = logits.float().log_softmax(-1).gather(-1, ids[:, 1 - kept :, None])[..., 0]
            advantages = torch.tensor([float(each.advantages[-1]) for each in part], device=DEVICE)[:, None]
            (-(chosen * advantages).sum() / len(batch) / kept).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_peak(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and the most bytes that torch had given out."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = time_call(act)
    return seconds, float(torch.cuda.max_memory_allocated()) if DEVICE == "cuda" else 0.0


def measure_trainer(folder: Path, name: str, scratch: Path, sequences: int, tokens: int, **changed: Any) -> dict[str, Any]:
    given = Configuration(run=RunSettings(model=str(folder), profile="gpu"))
    configuration = apply_profile(given, {}, has_gpus=True)
    table = msgspec.structs.replace(configuration.trainer, device=DEVICE, **changed)
    settings = TorchTrainerSettings(
        learner=msgspec.structs.replace(configuration.learner, micro_batch_size=64),
        algorithm=configuration.algorithm,
        trainer=table,
    )
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    episode = msgspec.structs.replace(configuration.episode, max_episode_tokens=tokens)
    learner = msgspec.structs.replace(configuration.learner, micro_batch_size=64)
    planned = msgspec.structs.replace(configuration, trainer=table, learner=learner, episode=episode)
    plan = plan_learner(shape, planned, 1, on_gpu=True)
    batch = draw_batch(SHAPES[name][1]["vocab_size"], tokens, sequences=sequences, prompt=tokens // 2)
    found: dict[str, tuple[float, float]] = {}
    made: list[TorchTrainer] = []
    found["load"] = measure_peak(lambda: made.append(TorchTrainer(folder, settings=settings)))
    trainer = made[0]
    trainer.train(batch[: max(sequences // 8, 1)], version=0, progress=0.0)
    found["step"] = measure_peak(partial(trainer.train, batch, version=0, progress=0.0))
    found["publish"] = measure_peak(lambda: trainer.save_weights(scratch / "weights"))
    (scratch / "checkpoint").mkdir(exist_ok=True)
    found["checkpoint"] = measure_peak(lambda: trainer.start_checkpoint(scratch / "checkpoint")())
    found["restore"] = measure_peak(lambda: trainer.restore(scratch / "checkpoint"))
    after = trainer.train(batch[: max(sequences // 8, 1)], version=0, progress=0.0)
    weights = shape.parameters
    work = sequences * tokens * (6 * weights + 6 * shape.layers * shape.hidden * tokens)
    whole = sum(value for part, value in plan.parts.items() if part != "runtime")
    return {
        "settings": changed,
        "parameters": weights,
        "tokens_per_second": round(sequences * tokens / found["step"][0]),
        "mfu": round(work / found["step"][0] / PEAK_FLOPS, 3),
        "loss_after_restore": after["loss"],
        "skipped_after_restore": after["skipped_updates"],
        "seconds": {part: round(value[0], 2) for part, value in found.items()},
        "peak_gb": {part: round(value[1] / 1e9, 2) for part, value in found.items()},
        "planned_gb": round(whole / 1e9, 2),
        "step_over_plan": round(found["step"][1] / whole, 3),
        "planned_parts_gb": {part: round(value / 1e9, 2) for part, value in plan.parts.items()},
    }


def measure_plain(folder: Path, name: str, sequences: int, tokens: int, budget: int) -> dict[str, Any]:
    batch = draw_batch(SHAPES[name][1]["vocab_size"], tokens, sequences=sequences, prompt=tokens // 2)
    try:
        step = build_plain_step(folder, batch, budget)
        step()
        seconds, peak = measure_peak(step)
    except torch.OutOfMemoryError:
        return {"plain": True, "token_budget": budget, "out_of_memory": True}
    speed = round(sequences * tokens / seconds)
    return {"plain": True, "token_budget": budget, "tokens_per_second": speed, "peak_gb": round(peak / 1e9, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["engine", "trainer"])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--tokens", type=int, default=SEQUENCE_TOKENS)
    given = parser.parse_args()
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    about = {"device": card, "torch": torch.__version__}
    for name in given.shapes:
        with tempfile.TemporaryDirectory() as place:
            folder = make_model(Path(place) / "model", name)
            if given.part == "engine":
                for rows in given.rows:
                    for dtype in (torch.bfloat16, torch.float32):
                        print(json.dumps({"model": name, **measure_engine(folder, name, rows, dtype), **about}), flush=True)
                continue
            for changed in ({}, {"packing": True}, {"gradient_checkpointing": False, "token_budget": 8192}):
                found = measure_trainer(folder, name, Path(place), given.sequences, given.tokens, **changed)
                print(json.dumps({"model": name, **found, **about}), flush=True)
            for budget in (16_384, 8192):
                found = measure_plain(folder, name, given.sequences, given.tokens, budget)
                print(json.dumps({"model": name, **found, **about}), flush=True)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if __name__ == "__main__":
    main()
