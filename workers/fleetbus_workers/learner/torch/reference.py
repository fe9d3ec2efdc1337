"""The model that the KL pulls to, beside the one that is trained: that of the run's start, or one that follows.

Above is the trainer. With adapters the reference is the model itself without them, and never follows. One that follows is part
of a checkpoint: which models it was made of is known from nothing else
(docs/decisions/0250-self-play-pulls-to-its-own-past.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fleetbus_workers.learner.torch import model as models
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharding import Shards, get_local

STATE = "reference."
"""What its tensors are named by in a checkpoint."""


class Reference:
    """``model`` is None where the settings need none. Raises `UserError` for a folder without a model."""

    def __init__(
        self, folder: Path, policy: PreTrainedModel, settings: TorchTrainerSettings, device: torch.device, shards: Shards
    ) -> None:
        algorithm = settings.algorithm
        self._policy = policy
        self._follows = settings.needs_reference and algorithm.kl_reference == "moving"
        self._every, self._share = algorithm.reference_sync_steps, algorithm.reference_mixup_alpha
        self._batches = 0
        self._adapted = settings.trainer.lora_rank > 0
        self.model: PreTrainedModel | None = None
        if settings.needs_reference:
            own = policy if self._adapted else models.load_model(folder, settings, device, shards).requires_grad_(False)
            self.model = own

    def use(self) -> AbstractContextManager[None]:
        """The block in which `model` computes what the reference says."""
        return models.disable_adapters(self._policy) if self._adapted else nullcontext()

    @torch.no_grad()
    def follow(self) -> None:
        """Count a batch that was trained. After every ``reference_sync_steps`` of them the weights become ``alpha * policy +
        (1 - alpha) * reference`` (TRL's ``sync_ref_model``; arXiv 2404.09656)."""
        if not self._follows or self.model is None:
            return
        self._batches += 1
        if self._batches % self._every == 0:
            for own, trained in zip(self.model.parameters(), self._policy.parameters(), strict=True):
                get_local(own).lerp_(get_local(trained.detach()), self._share)

    def collect_state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps of it: none of one that stays."""
        if not self._follows or self.model is None:
            return {}
        weights = {f"{STATE}weights.{name}": tensor.detach() for name, tensor in models.iterate_tensors(self.model)}
        return weights | {f"{STATE}batches": torch.tensor(self._batches)}

    def finish_restore(self, state: dict[str, torch.Tensor]) -> None:
        """After the tensors of `collect_state` were read into."""
        if self._follows:
            self._batches = int(state[f"{STATE}batches"])
