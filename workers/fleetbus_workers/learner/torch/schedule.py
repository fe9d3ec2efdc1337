"""The learning rate of an update: it rises over the first ones, and falls with the progress of the run."""

from __future__ import annotations

import math

from fleetbus_workers.learner.torch.settings import TorchTrainerSettings


def compute_learning_rate(settings: TorchTrainerSettings, progress: float, updates: int) -> float:
    """The rate for ``progress`` in [0, 1) after so many ``updates``."""
    passed = min(max(progress, 0.0), 1.0)
    share = {"linear": 1.0 - passed, "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)), "constant": 1.0}
    decayed = 1.0 - (1.0 - settings.learner.min_lr_ratio) * (1.0 - share[settings.trainer.lr_scheduler_type])
    warmed = min(1.0, (updates + 1) / max(settings.learner.warmup_steps, 1))
    return settings.learner.learning_rate * decayed * warmed
