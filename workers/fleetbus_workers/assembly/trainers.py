"""The trainer that the configuration names."""

from __future__ import annotations

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings


def build_trainer_settings(configuration: Configuration) -> TorchTrainerSettings:
    """Settings of the tables ``algorithm`` and ``trainer`` have the trainer's own names, those of ``learner`` older ones."""
    learner = configuration.learner
    tables = msgspec.structs.asdict(configuration.algorithm) | msgspec.structs.asdict(configuration.trainer)
    shared_settings = {name: value for name, value in tables.items() if name in TorchTrainerSettings.__struct_fields__}
    return TorchTrainerSettings(
        learning_rate=learner.learning_rate,
        min_lr_ratio=learner.min_lr_ratio,
        dual_clip=learner.dual_clip or None,
        warmup_steps=learner.warmup_steps,
        max_grad_norm=learner.max_grad_norm,
        clip_ratio_low=learner.clip_ratio_low,
        clip_ratio_high=learner.clip_ratio_high,
        minibatches=learner.minibatches,
        micro_batch_size=learner.micro_batch_size,
        threads=learner.threads,
        images=configuration.environment.images,
        **shared_settings,
    )
