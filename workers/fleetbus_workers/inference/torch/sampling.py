"""From logits to tokens by the inverse of the cumulative distribution: one uniform number in, one token out, row by row.

A row's token depends on its own logits and number alone, so what else is in the batch does not matter.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_workers.inference.torch.torchscript import compile_function

UNIFORM_BITS = 23
"""Bits of a uniform number. One fewer than float32 holds, so that a number times a sum stays below the sum."""


def sample_tokens(
    logits: torch.Tensor, uniforms: NDArray[np.float32], temperatures: Sequence[float], top_ps: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sampled ids and their log-probabilities, before top-p, at the row's temperature (at 1 where it is 0: greedy).

    ``logits`` float32 [n, vocabulary]; ``uniforms`` [n] in [0, 1), multiples of 2**-`UNIFORM_BITS`.
    """
    numbers = torch.from_numpy(uniforms).to(logits.device)[:, None]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        scales = [1.0 / (temperature or 1.0) for temperature in temperatures]
        logits = logits * torch.tensor(scales, device=logits.device)[:, None]
    ids, logprobs = _compiled_draw(logits, numbers)
    for row, (temperature, top_p) in enumerate(zip(temperatures, top_ps, strict=True)):
        if temperature == 0.0:
            ids[row] = logits[row].argmax()
        elif top_p < 1.0:
            ids[row] = _sample_top_p(logprobs[row].exp(), numbers[row], top_p)
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


def _sample_top_p(probabilities: torch.Tensor, draw_uniform: torch.Tensor, top_p: float) -> torch.Tensor:
    """Sample from the smallest set of most likely tokens whose probabilities sum to ``top_p`` or more."""
    ordered, indices = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    nucleus = torch.where(before < top_p, ordered, 0.0)
    nucleus[0] = ordered[0]
    return indices[_invert_cdf(nucleus[None], draw_uniform[None])[0]]


_compiled_draw = compile_function(_draw)
