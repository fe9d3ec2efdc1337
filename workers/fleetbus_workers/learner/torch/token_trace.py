"""Notes of each trained token what the updates of one call of the trainer did with it, for the token record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from fleetbus_workers.learner.base import SequenceTokens, TrainingSequence
from fleetbus_workers.learner.torch.sharding import Shards


class TokenTrace:
    """Tensors on the CPU by sequence of the batch. ``scale``: by how much losses were multiplied before their gradients. Not
    ``on``: nothing is noted."""

    def __init__(self, scale: float = 1.0, *, on: bool = True) -> None:
        self._on = on
        self.first = 0
        """Number in the batch of the first sequence of the update that goes on."""
        self._scale = scale
        self._logprobs: dict[int, torch.Tensor] = {}
        self._clipped: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, sequences: torch.Tensor, logprobs: torch.Tensor, *, before: torch.Tensor, clipped: torch.Tensor) -> None:
        """Of the N tokens of a micro-batch, in its order: the number of each one's sequence in the update, log-probabilities
        whose gradient is to come, those before the first update, and 1 where the ratio was clipped."""
        if not self._on:
            return
        numbers, counts = torch.unique_consecutive(sequences.cpu(), return_counts=True)
        keys, sizes = [self.first + number for number in numbers.tolist()], counts.tolist()
        parts = torch.split(before.cpu(), sizes), torch.split(clipped.cpu().bool(), sizes)
        for key, was, cut in zip(keys, *parts, strict=True):
            self._logprobs.setdefault(key, was)
            self._clipped[key] = self._clipped[key] | cut if key in self._clipped else cut
        if logprobs.requires_grad:
            logprobs.register_hook(partial(self._add_gradients, keys, sizes))  # type: ignore[no-untyped-call]

    def _add_gradients(self, keys: Sequence[int], sizes: Sequence[int], gradient: torch.Tensor) -> None:
        for key, part in zip(keys, torch.split(gradient.detach().float().cpu() / -self._scale, list(sizes)), strict=True):
            self._gradients[key] = self._gradients[key] + part if key in self._gradients else part

    def collect(self, batch: Sequence[TrainingSequence], shards: Shards) -> list[SequenceTokens]:
        """The tokens of each sequence of ``batch`` that has any, of all processes. Every process has to call it."""
        logprobs, clipped, gradients = map(shards.merge_across, (self._logprobs, self._clipped, self._gradients))
        found = []
        for key, known in sorted(logprobs.items()):
            mask, places = batch[key].loss_mask, batch[key].places
            found.append(
                SequenceTokens(
                    episode_id=batch[key].episode_id,
                    places=np.flatnonzero(mask) if places is None else places[mask],
                    logprobs=known.float().numpy(),
                    gradients=gradients[key].numpy() if key in gradients else np.zeros(len(known), np.float32),
                    clipped=clipped[key].numpy(),
                )
            )
        return found
