"""Local rollouts of the default task in this process, without bus or database: to evaluate a policy or test a trainer.

All episodes advance token by token side by side: at each step a row is fed either what the environment says or what the policy
samples, so that no row is ever padded and the system prompt is run once for all.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from fleetbus.core.text.prompts import NO_CALL, format_error, format_unknown_tool
from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus_schemas import ChatMessage, ToolCall
from fleetbus_workers.environment.adapters.warehouse.items import FIELDS, TOOLS, Warehouse
from fleetbus_workers.starter.conversation import TURN_LIMIT, build_opening, format_json_result, format_missing_item
from fleetbus_workers.starter.tokenizer import TURN_START, encode, encode_with_mask
from fleetbus_workers.weights.forward_cache import build_cache_options, get_cache

TURN_TOKENS = 48
"""Tokens of one turn; a longer one ends the episode."""


class Rollout(msgspec.Struct, kw_only=True):
    """One episode: its tokens, which of them were sampled, their log-probabilities (0 elsewhere), and the reward."""

    ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    reward: float = 0.0


def step_environment(warehouse: Warehouse, said: str) -> tuple[str, float | None]:
    """Step the environment with a turn of the policy: its answer, and the reward if the turn ended the episode."""
    call = parse_tool_calls(said).call
    if is_done(said):
        return "", float(final_answer(said) == str(warehouse.answer))
    return NO_CALL if call is None else _call_tool(warehouse, call), None


def _call_tool(warehouse: Warehouse, call: ToolCall) -> str:
    match call.name, call.arguments:
        case "find_item", {"name": str(name)}:
            row = next((item for item in warehouse.items if item.name == name), None)
            return format_missing_item(name) if row is None else format_json_result({"id": row.id})
        case "get_field", {"id": int(id), "field": str(field)}:
            row = next((item for item in warehouse.items if item.id == id), None)
            if field not in FIELDS:
                return format_error(f'no field "{field}"')
            return format_error(f"no item with id {id}") if row is None else format_json_result({field: row.field(field)})
        case (("find_item" | "get_field"), _):
            return format_error(f"wrong arguments for {call.name}")
    return format_unknown_tool(call.name, TOOLS)


class _RolloutRow:
    """One episode in play: what is still to be fed, and what was sampled of the present turn."""

    def __init__(self, tokenizer: Any, warehouse: Warehouse) -> None:
        self._tokenizer = tokenizer
        self._warehouse = warehouse
        self._turn: list[int] = []
        self._turns = 0
        ids, _ = encode_with_mask(tokenizer, build_opening(warehouse))
        self.forced = ids + encode(tokenizer, f"{TURN_START}assistant\n")
        self.played = Rollout(ids=[], loss_mask=[], logprobs=[])
        self.over = False

    def feed(self, count: int) -> list[int]:
        """The next ``count`` tokens that the environment forces."""
        fed, self.forced = self.forced[:count], self.forced[count:]
        self._record(fed, False, [0.0] * count)
        return fed

    def append_sampled(self, token: int, logprob: float) -> None:
        self._record([token], True, [logprob])
        self._turn.append(token)
        if token != self._tokenizer.eos_token_id:
            self.over = len(self._turn) >= TURN_TOKENS
            return
        said = self._tokenizer.decode(self._turn[:-1])
        seen, reward = step_environment(self._warehouse, said)
        self._turn, self._turns = [], self._turns + 1
        self.over = reward is not None or self._turns >= TURN_LIMIT
        self.played.reward = reward or 0.0
        if not self.over:
            message, _ = encode_with_mask(self._tokenizer, (ChatMessage(role="user", content=seen),))
            self.forced = encode(self._tokenizer, "\n") + message + encode(self._tokenizer, f"{TURN_START}assistant\n")

    def _record(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float]) -> None:
        self.played.ids += ids
        self.played.loss_mask += [sampled] * len(ids)
        self.played.logprobs += logprobs


@torch.no_grad()
def run_rollouts(
    model: PreTrainedModel, tokenizer: Any, warehouses: Sequence[Warehouse], *, seed: int, temperature: float = 1.0
) -> list[Rollout]:
    """One episode per warehouse, sampled at ``temperature`` (0: greedy)."""
    generator = torch.Generator().manual_seed(seed)
    rows = [_RolloutRow(tokenizer, warehouse) for warehouse in warehouses]
    played = [row.played for row in rows]
    cache, logits = _prefill(model, rows)
    while rows:
        forced = min(len(row.forced) for row in rows)
        if forced:
            fed = torch.tensor([row.feed(forced) for row in rows])
        else:
            fed = _advance(rows, logits, generator, temperature)[:, None]
            kept = [index for index, row in enumerate(rows) if not row.over]
            if len(kept) < len(rows):
                rows, fed = [rows[index] for index in kept], fed[kept]
                cache.batch_select_indices(torch.tensor(kept, dtype=torch.int64))
        if rows:
            logits = model(input_ids=fed, **build_cache_options(model, cache), logits_to_keep=1).logits[:, -1]
    return played


def _prefill(model: PreTrainedModel, rows: Sequence[_RolloutRow]) -> tuple[DynamicCache, torch.Tensor]:
    """Run what all rows begin with once, for one row, and repeat it for the others."""
    first, last = min(row.forced for row in rows), max(row.forced for row in rows)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first) - 1)
    fed = [row.feed(common) for row in rows]
    output = model(input_ids=torch.tensor(fed[:1]), use_cache=True, logits_to_keep=1)
    cache: DynamicCache = get_cache(output)
    cache.batch_repeat_interleave(len(rows))
    return cache, output.logits[:, -1].expand(len(rows), -1)


def _advance(rows: Sequence[_RolloutRow], logits: torch.Tensor, generator: torch.Generator, temperature: float) -> torch.Tensor:
    """One token of every row: the forced one where there is one, a sampled one elsewhere."""
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    if temperature:
        drawn = torch.rand((len(rows), 1), generator=generator)
        tokens = torch.searchsorted(logprobs.exp().cumsum(-1), drawn).clamp(max=logits.shape[-1] - 1)
    else:
        tokens = logprobs.argmax(-1, keepdim=True)
    sampled, chosen = tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()
    fed = []
    for row, token, logprob in zip(rows, sampled, chosen, strict=True):
        if row.forced:
            fed += row.feed(1)
        else:
            row.append_sampled(token, logprob)
            fed.append(token)
    return torch.tensor(fed)


def compute_success_rate(played: Sequence[Rollout]) -> float:
    """Share of episodes with reward 1."""
    return float(np.mean([episode.reward for episode in played]))
