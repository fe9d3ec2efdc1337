"""One step of a model over all active rows: the seam between the engine and the two ways of running a model.

Every row feeds exactly one token and gets the logits that follow it. A row that joins brings all but the last token of what
is not cached as ``extra`` tokens, which only leave keys and values behind: their logits are not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fleetbus_workers.inference.torch.kv_cache import Ids
from fleetbus_workers.inference.torch.slots import SlotCache


@dataclass(frozen=True)
class PrefillTokens:
    """Tokens of ``row`` at positions ``start``, ``start`` + 1, ... before the one that the row feeds; never empty.

    Negative ids are embeddings of ``images``, as `fleetbus_workers.images.embedding` codes them; only a model that sees is
    given any.
    """

    row: int
    start: int
    ids: Ids
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Batch:
    """``tokens`` and ``positions`` int64 [n]: what rows ``[0, n)`` feed. ``longest`` is the largest position plus one.

    All rows have the same first ``shared`` ids, with keys and values of the same version.
    """

    tokens: Ids
    positions: Ids
    longest: int
    shared: int
    prefills: tuple[PrefillTokens, ...]


class Runner(Protocol):
    """A model with its slots."""

    cache: SlotCache
    vocabulary: int
    shapes: Mapping[str, tuple[int, ...]]
    """Names and shapes of the tensors of a version, tied ones under their first name."""

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Copy a version's tensors into the form that `adopt` takes, outside the engine's thread."""

    def adopt(self, prepared: Any) -> None:
        """Compute with a prepared version from the next step on."""

    def step(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [n, vocabulary], after each row's token; keys and values are written on the way."""
