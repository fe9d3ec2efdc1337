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
    logits: torch.Tensor, uniforms: NDArray[np.float32], settings: Sequence[SamplingSettings]
) -> tuple[list[int], list[float]]:
    """Sampled ids and their log-probabilities, before any token is left out, at the row's temperature (at 1 where it is 0:
    greedy).

    ``logits`` float32 [n, vocabulary]; ``uniforms`` [n] in [0, 1), multiples of 2**-`UNIFORM_BITS`; ``settings`` [n], of which
    temperature, top_p, top_k and min_p count.
    """
    numbers = torch.from_numpy(uniforms).to(logits.device)[:, None]
    if any(row.temperature not in (0.0, 1.0) for row in settings):
        scales = [1.0 / (row.temperature or 1.0) for row in settings]
        logits = logits * torch.tensor(scales, device=logits.device)[:, None]
    ids, logprobs = _draw(logits, numbers)
    for row, chosen in enumerate(settings):
        if chosen.temperature == 0.0:
            ids[row] = logits[row].argmax()
        elif chosen.top_p < 1.0 or chosen.top_k or chosen.min_p:
            ids[row] = _sample_likely(logprobs[row].exp(), numbers[row], chosen)
    return ids[:, 0].tolist(), logprobs.gather(1, ids)[:, 0].tolist()


def _invert_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds the number, int64 [n, 1]. Never one of probability 0."""
    cumulative = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[-1] - 1)  # reached only where probabilities are not finite


def _draw(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled ids [n, 1] and the log-probabilities [n, vocabulary] that they were sampled from."""
    logprobs = logits.log_softmax(-1)
    return _invert_cdf(logprobs.exp(), uniforms), logprobs


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
