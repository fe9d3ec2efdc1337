"""Measures what sampling with weights in 8 bits costs the learner: log-probabilities of sampler and trainer, without a GPU.

    python benchmarks/fp8_rollouts.py MODEL_FOLDER [--rows 8] [--tokens 96] [--json]

The sampler computes as vLLM does with ``inference.vllm = {"quantization": ...}``, emulated: what enters a product and its
weights are rounded to float8 (e4m3), times a scale in float32, and added up in float32; everything else is bfloat16, the head
float32 (`inference.head_dtype`). ``weights`` rounds the weights alone, with one scale each; ``tensor`` also what enters, with
one scale per token; ``block`` has one scale per 128 x 128 of a weight and per 128 numbers that enter. The trainer computes the
tokens that were sampled in bfloat16 beneath a head in float32, as the profile `gpu` does: without float8 both are equal here.

``mean``, ``largest`` and ``over_tenth`` are of the absolute difference of a sampled token's log-probability: ``mean`` is what
the learner reports as ``logprob_difference_mean``. ``kept`` is the effective share of the tokens once each is weighed by its
ratio.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128
PROMPT = 48

Round = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder of transformers, of real weights: random ones have no outliers")
    parser.add_argument("--rows", type=int, default=8, help="texts that are continued")
    parser.add_argument("--tokens", type=int, default=96, help="sampled of each")
    parser.add_argument("--json", action="store_true", help="print JSON lines alone")
    given = parser.parse_args()
    prompts = read_prompts(given.model, given.rows)
    for name, (weights, inputs) in FORMATS.items():
        sampler = load(given.model, weights, inputs)
        torch.manual_seed(1)
        rows = sampler.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=given.tokens, max_new_tokens=given.tokens,
            do_sample=True, top_k=0, temperature=1.0, pad_token_id=0,
        )  # fmt: skip
        sampled = score(sampler, rows)
        del sampler
        found = {"format": name, "tokens": sampled.numel()} | compare(sampled, score(load(given.model, keep, keep), rows))
        line = msgspec.json.encode(found).decode() if given.json else "  ".join(f"{key} {each}" for key, each in found.items())
        print(line)
        sys.stdout.flush()


def read_prompts(model: Path, rows: int) -> torch.Tensor:
    """Beginnings of pages of this documentation: rows x `PROMPT`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pages = sorted((ROOT / "docs").glob("*.md"))
    texts = [tokenizer(page.read_text())["input_ids"] for page in pages]
    return torch.tensor([text[:PROMPT] for text in texts if len(text) > PROMPT][:rows])


def load(folder: Path, weights: Round, inputs: Round) -> Any:
    """The model with products of what ``weights`` and ``inputs`` make of both, added up in float32; the head stays whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            replace_product(module, weights, inputs)
    head, embedding = model.lm_head, model.lm_head.weight.detach().float()
    head.forward = lambda hidden: F.linear(hidden.float(), embedding)
    return model


def replace_product(module: torch.nn.Linear, weights: Round, inputs: Round) -> None:
    weight = weights(module.weight.detach().float())
    bias = None if module.bias is None else module.bias.detach().float()

    def forward(entering: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs(entering.float()), weight, bias).to(torch.bfloat16)

    module.forward = forward  # type: ignore[assignment, method-assign]


def keep(values: torch.Tensor) -> torch.Tensor:
    return values


def round_whole(values: torch.Tensor) -> torch.Tensor:
    """With one scale."""
    return round_scaled(values, values.abs().max())


def round_rows(values: torch.Tensor) -> torch.Tensor:
    """With one scale per row of the last dimension, such as a token's."""
    return round_scaled(values, values.abs().amax(-1, keepdim=True))


def round_groups(values: torch.Tensor) -> torch.Tensor:
    """With one scale per `BLOCK` numbers of the last dimension."""
    padded = F.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return round_rows(padded).flatten(-2)[..., : values.shape[-1]]


def round_blocks(values: torch.Tensor) -> torch.Tensor:
    """With one scale per `BLOCK` x `BLOCK` numbers of a matrix."""
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    return round_scaled(blocks, blocks.abs().amax((1, 3), keepdim=True)).flatten(2).flatten(0, 1)[:rows, :columns]


def round_scaled(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """To the nearest float8 once the ``largest`` is the largest of those."""
    scale = largest.clamp(min=1e-12) / LARGEST
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


FORMATS: dict[str, tuple[Round, Round]] = {
    "weights": (round_whole, keep),
    "tensor": (round_whole, round_rows),
    "block": (round_blocks, round_groups),
}


@torch.no_grad()
def score(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what was sampled: rows x tokens."""
    values = model(rows).logits.float().log_softmax(-1)[:, PROMPT - 1 : -1]
    return values.gather(-1, rows[:, PROMPT:, None])[..., 0]


def compare(sampled: torch.Tensor, trained: torch.Tensor) -> dict[str, float]:
    gaps, ratios = (sampled - trained).abs(), (trained - sampled).exp()
    kept = float(ratios.sum() ** 2 / (ratios**2).sum() / ratios.numel())
    over = float((gaps > 0.1).float().mean())
    return {
        "mean": round(float(gaps.mean()), 5), "largest": round(float(gaps.max()), 4), "over_tenth": round(over, 4),
        "kept": round(kept, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
