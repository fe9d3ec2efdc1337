"""A policy that says "step N", for the trainers' real loops on `CountingEnvironment`, and what its episodes look like."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

STARTER = Path(__file__).parents[2] / "workers/fleetbus_workers/starter/policy"
LOGPROB = -0.5


def open_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER, local_files_only=True)


def sample(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """The next turn after what the environment has counted so far, with its end, and a log-probability per id."""
    counted = re.findall(r"(\d+): step", tokenizer.decode(ids))
    text = f"step {int(counted[-1]) + 1 if counted else 1}"
    sampled = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return sampled, [LOGPROB] * len(sampled)


def tell(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None, reward: float) -> None:
    """Print one row as the trainer would train it: texts of sampled spans, and of those between."""
    spans: dict[int, list[str]] = {0: [], 1: []}
    for own, span in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        spans[own].append(tokenizer.decode([place for place, _ in span], skip_special_tokens=True))
    if logprobs is not None:
        assert [value == LOGPROB for value in logprobs] == [bool(own) for own in mask]
    line = {"sampled": spans[1], "observed": spans[0], "reward": reward}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
