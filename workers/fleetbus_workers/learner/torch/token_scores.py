"""Log-probabilities and entropies out of hidden states, a chunk of tokens at a time: logits [N, vocabulary] never exist whole.

What a chunk computes is computed again when gradients flow through it, so that only hidden states are kept between. At 152,000
entries of a vocabulary 8,192 tokens have 5 GB of logits, and what the softmax and its gradient make of them is four times that.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 << 20, 256 << 20
"""Of one chunk's logits in float32. Fewer tokens than this are computed at once. A GPU waits for the launches of small ones."""


class Scores(NamedTuple):
    """Of N sampled tokens: ``logprobs`` [N] with gradient, ``entropies`` [N] with one where it was asked for; natural
    logarithms."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


def score_tokens(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: torch.Tensor | float = 1.0,
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
) -> Scores:
    """Scores of ``targets`` int64 [N] under the logits that ``head`` makes of ``hidden`` [N, H], divided by ``temperature``
    (one for all or one per token [N])."""
    size = max(1, (chunk_bytes or (GPU_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES)) // (4 * vocabulary))

    def score(part: torch.Tensor, chosen: torch.Tensor, divisor: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        return score_logits(head(part), chosen, divisor, entropy_gradient)

    if len(targets) <= size:
        return Scores(*score(hidden, targets, temperature))
    found = []
    for start in range(0, len(targets), size):
        rows = slice(start, start + size)
        divisor = temperature[rows] if isinstance(temperature, torch.Tensor) else temperature
        found.append(checkpoint(score, hidden[rows], targets[rows], divisor, use_reentrant=False, preserve_rng_state=False))
    return Scores(torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found]))


def score_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, both float32 [N], of logits [N, vocabulary]."""
    logits = logits.float()
    if isinstance(temperature, torch.Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    everywhere = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(everywhere.exp() * everywhere).sum(-1)
    return everywhere.gather(-1, targets[:, None])[:, 0], entropies
