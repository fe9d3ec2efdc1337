"""From logits to tokens by the inverse of the cumulative distribution: one uniform number in, one token out, row by row.

A row's token depends on its own logits and number alone, so what else is in the batch does not matter.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_schemas import SamplingSettings

UNIFORM_BITS = 23
"""Bits of a uniform number. One fewer than float32 holds, so that a number times a sum stays below the sum."""


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Settings that this engine does not have."""


def sample_tokens(
    logits: torch.Tensor,
    uniforms: NDArray[np.float32],
    settings: Sequence[SamplingSettings],
    rows: NDArray[np.int64] | None = None,
) -> tuple[list[int], list[float]]:
    """Sampled ids and their log-probabilities, before any token is left out, at the turn's temperature (at 1 where it is 0:
    greedy).

    ``logits`` float32 [r, vocabulary]; ``uniforms`` [n] in [0, 1), multiples of 2**-`UNIFORM_BITS`; ``settings`` [n], of which
    temperature, top_p, top_k and min_p count; ``rows`` int64 [n], ascending: each turn's row of the logits, by default one
    each. What depends on a row alone is computed once for all of its turns.
    """
    if rows is None:
        rows = np.arange(len(uniforms))
    if any(turn.temperature not in (0.0, 1.0) for turn in settings):
        scales = [1.0 / (turn.temperature or 1.0) for turn in settings]
        own = logits if np.array_equal(rows, np.arange(len(logits))) else logits[rows]
        logits = own * torch.tensor(scales, device=logits.device)[:, None]
        rows = np.arange(len(rows))
    logprobs = logits.log_softmax(-1)
    ids = _draw(logprobs, rows, uniforms)
    numbers = torch.from_numpy(uniforms).to(logits.device)
    for turn, (row, chosen) in enumerate(zip(rows.tolist(), settings, strict=True)):
        if chosen.temperature == 0.0:
            ids[turn] = logits[row].argmax()
        elif chosen.top_p < 1.0 or chosen.top_k or chosen.min_p:
            ids[turn] = _sample_likely(logprobs[row].exp(), numbers[turn : turn + 1], chosen)
    return ids.tolist(), logprobs[torch.from_numpy(rows).to(ids.device), ids].tolist()


def _draw(logprobs: torch.Tensor, rows: NDArray[np.int64], uniforms: NDArray[np.float32]) -> torch.Tensor:
    """One id for each uniform number [n] from the distribution of its row, int64 [n]."""
    counts = np.bincount(rows, minlength=len(logprobs))
    places = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    padded = np.zeros((len(logprobs), int(counts.max(initial=0))), np.float32)
    padded[rows, places] = uniforms
    found = _invert_cdf(logprobs.exp(), torch.from_numpy(padded).to(logprobs.device))
    return found[torch.from_numpy(rows).to(found.device), torch.from_numpy(places).to(found.device)]


def _invert_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds the number, for each of ``uniforms`` [rows, n]: int64 [rows, n].
    Never one of probability 0."""
    cumulative = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[-1] - 1)  # reached only where probabilities are not finite


def _sample_likely(probabilities: torch.Tensor, draw_uniform: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Sample from the likeliest tokens: those of at least ``min_p`` of the first one's probability, of these ``top_k``, and of
    these the smallest set whose probabilities sum to ``top_p`` of theirs or more."""
    ordered, indices = probabilities.sort(descending=True, stable=True)
    share = settings.top_p
    if settings.min_p or settings.top_k:
        ordered = torch.where(ordered >= settings.min_p * ordered[0], ordered, 0.0)
        ordered[settings.top_k or len(ordered) :] = 0.0
        share *= float(ordered.sum())
    before = ordered.cumsum(-1) - ordered
    nucleus = torch.where(before < share, ordered, 0.0) if settings.top_p < 1.0 else ordered
    nucleus[0] = ordered[0]
    return indices[_invert_cdf(nucleus[None], draw_uniform[None])[0]]
