"""Faults to plant into the trainer and its checkpoints, to which the simulation, which has no model, is blind.

See `tests/system/test_planted_faults_elsewhere.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def moments_not_restored(patch: pytest.MonkeyPatch) -> None:
    """A learner that resumes has the weights of its checkpoint, and an optimizer that remembers nothing."""
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    restore = TorchTrainer.restore

    def faulty(self: TorchTrainer, folder: Path) -> None:
        restore(self, folder)
        self._optimizer.state.clear()

    patch.setattr(TorchTrainer, "restore", faulty)


def warmup_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """Each learner counts its own updates."""
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    restore = TorchTrainer.restore

    def faulty(self: TorchTrainer, folder: Path) -> None:
        restore(self, folder)
        self._updates = 0

    patch.setattr(TorchTrainer, "restore", faulty)


def gradients_kept(patch: pytest.MonkeyPatch) -> None:
    """Every update adds the gradients of all before it."""
    import torch

    patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


def temperature_of_the_sampler_ignored(patch: pytest.MonkeyPatch) -> None:
    import fleetbus_workers.learner.torch.trainer as trainer
    from fleetbus_workers.learner.torch.forward import compute_scores

    def faulty(*arguments: Any, temperature: object, **options: Any) -> Any:
        return compute_scores(*arguments, temperature=1.0, **options)

    patch.setattr(trainer, "compute_scores", faulty)


def prefix_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """What the episodes of a group have in common is run once, and never learned."""
    from fleetbus_workers.learner.torch.forward import SharedPrefix

    patch.setattr(SharedPrefix, "close", lambda self: None)


def loss_averaged_by_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """How much a token counts depends on which others it shares a micro-batch with."""
    import fleetbus_workers.learner.torch.trainer as trainer
    from fleetbus_workers.learner.torch.loss import compute_loss

    def faulty(plan: Any, batch: Any, tokens: Any, *arguments: Any, **options: Any) -> Any:
        return compute_loss(plan, batch, tokens, *arguments, **options) * (
            options["totals"].tokens / max(len(tokens.logprobs), 1)
        )

    patch.setattr(trainer, "compute_loss", faulty)


def index_of_a_checkpoint_believed(patch: pytest.MonkeyPatch) -> None:
    """Its files are compared with its index, and the index with nothing."""
    import fleetbus_workers.learner.checkpoints as checkpoints

    patch.setattr(checkpoints, "hash_index", lambda path: EveryDigest())


class EveryDigest:
    """Equals any."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]
