"""The trainer that the configuration names."""

from __future__ import annotations

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings


def trainer_settings(configuration: Configuration) -> TorchTrainerSettings:
    """Settings of the tables ``algorithm`` and ``trainer`` have the trainer's own names, those of ``learner`` older ones."""
    learner = configuration.learner
    tables = msgspec.structs.asdict(configuration.algorithm) | msgspec.structs.asdict(configuration.trainer)
    same = {name: value for name, value in tables.items() if name in TorchTrainerSettings.__struct_fields__}
    return TorchTrainerSettings(
        learning_rate=learner.learning_rate,
        decayed_to=learner.learning_rate_final,
        dual_clip=learner.dual_clip or None,
        warmup_updates=learner.warmup_steps,
        gradient_norm=learner.gradient_clip,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        minibatches=learner.minibatches,
        micro_batch_size=learner.micro_batch,
        threads=learner.threads,
        images=configuration.environment.images,
        **same,
    )
