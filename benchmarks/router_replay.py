"""Measures the loss of a mixture of experts between sampler and trainer, and what replaying the sampler's routing gives back.

    python benchmarks/router_replay.py [--steps 300] [--json]

A tiny Qwen3-MoE learns this repository's documentation byte by byte, so that its routers and log-probabilities are those of
a model that was trained. Then it samples in bfloat16, as engines do, and the trainer computes the same tokens in float32: once
with its own routing, once with the experts that the sampler chose (rollout routing replay, R3, arXiv 2510.11370: the choice is
replayed, the weights of the chosen experts are the trainer's own, so that gradients reach the router). A dense model of the
same width, trained alike, shows what the precision alone costs.

``routed_otherwise`` is the share of a layer's choices in which at least one expert differs, ``tokens_touched`` of tokens in
which any layer's does; ``mean``, ``largest`` and ``over_tenth`` are of the absolute difference of a sampled token's
log-probability.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
BATCH, LENGTH = 8, 128
SAMPLED, PROMPT, ROWS = 192, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training before anything is measured")
    parser.add_argument("--json", action="store_true", help="print JSON lines alone")
    given = parser.parse_args()
    text = torch.tensor(list("".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))).encode()))
    for name, config in (
        ("dense", Qwen3Config(**SHAPE, intermediate_size=256)),
        ("experts", Qwen3MoeConfig(**SHAPE, **EXPERTS, intermediate_size=256)),
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        loss = train(model, text, given.steps)
        found = {"model": name, "steps": given.steps, "loss": round(loss, 3)} | measure(model, text)
        print(
            msgspec.json.encode(found).decode() if given.json else "  ".join(f"{key} {value}" for key, value in found.items())
        )
        sys.stdout.flush()


def draw_rows(text: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random pieces of the text: rows x length."""
    starts = torch.randint(0, len(text) - length, (rows,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def train(model: Any, text: torch.Tensor, steps: int) -> float:
    """The loss of the last step, in nats per byte."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(0.0)
    model.train()
    for _ in range(steps):
        rows = draw_rows(text, BATCH, LENGTH, generator)
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item()


@torch.no_grad()
def measure(trainer: Any, text: torch.Tensor) -> dict[str, Any]:
    """Sample in bfloat16, then compute the same tokens in float32 with and without the sampler's routing."""
    sampler = AutoModelForCausalLM.from_config(trainer.config, attn_implementation="sdpa").eval()
    sampler.load_state_dict(trainer.state_dict())
    sampler.to(torch.bfloat16)
    torch.manual_seed(2)
    rows = draw_rows(text, ROWS, PROMPT, torch.Generator().manual_seed(3))
    rows = sampler.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=SAMPLED, do_sample=True, top_k=0)
    with record_routing(sampler) as chosen:
        sampled = score(sampler, rows)
    with record_routing(trainer) as own:
        plain = score(trainer, rows)
    found: dict[str, Any] = {"tokens": sampled.numel(), "without_replay": compare(sampled, plain)}
    if chosen:
        differs = torch.stack(
            [one.sort(-1).values.ne(other.sort(-1).values).any(-1) for one, other in zip(chosen, own, strict=True)]
        )
        found |= {"routed_otherwise": round(float(differs.float().mean()), 4)}
        found |= {"tokens_touched": round(float(differs.any(0).float().mean()), 4)}
        with replay_routing(trainer, chosen):
            found["with_replay"] = compare(sampled, score(trainer, rows))
        found["bytes_per_token"] = len(chosen) * trainer.config.num_experts_per_tok
    return found


def score(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what was sampled: rows x `SAMPLED`."""
    values = model(rows).logits.float().log_softmax(-1)[:, PROMPT - 1 : -1]
    return values.gather(-1, rows[:, PROMPT:, None])[..., 0]


def compare(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    gaps = (one - other).abs()
    over = float((gaps > 0.1).float().mean())
    return {"mean": round(float(gaps.mean()), 5), "largest": round(float(gaps.max()), 4), "over_tenth": round(over, 4)}


@contextmanager
def record_routing(model: Any) -> Iterator[list[torch.Tensor]]:
    """The experts that each layer's router chooses: per layer, tokens x experts per token."""
    chosen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *each: chosen.append(each[2][2])) for router in list_routers(model)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replay_routing(model: Any, chosen: list[torch.Tensor]) -> Iterator[None]:
    """Each layer's router gives the recorded experts, weighed by its own probabilities."""

    def replay(indices: torch.Tensor) -> Any:
        def replace(router: Any, given: Any, output: Any) -> Any:
            weights = output[0].float().softmax(-1).gather(-1, indices)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return output[0], weights.to(output[1].dtype), indices

        return replace

    pairs = zip(list_routers(model), chosen, strict=True)
    hooks = [router.register_forward_hook(replay(indices)) for router, indices in pairs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def list_routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "norm_topk_prob") and hasattr(module, "top_k")]


if __name__ == "__main__":
    main()
