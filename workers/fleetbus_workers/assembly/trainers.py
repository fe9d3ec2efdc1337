"""The trainer that the configuration names."""

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.processors import multiplies_bfloat16
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings


def build_trainer_settings(configuration: Configuration) -> TorchTrainerSettings:
    """The tables of the configuration that the torch trainer reads."""
    configuration = choose_precision(configuration)
    return TorchTrainerSettings(
        learner=configuration.learner,
        algorithm=configuration.algorithm,
        trainer=configuration.trainer,
        images=configuration.environment.images,
    )


def choose_precision(configuration: Configuration) -> Configuration:
    """The configuration with the precision that ``auto`` stands for on this machine: where bfloat16 is emulated it is slower
    than float32, and a sampler with ``inference.dtype = auto`` does not compute in it."""
    trainer = configuration.trainer
    if trainer.precision != "auto":
        return configuration
    import torch

    on_processor = trainer.device == "cpu" or (trainer.device == "auto" and not torch.cuda.is_available())
    chosen = "bfloat16" if not on_processor or multiplies_bfloat16() else "float32"
    return msgspec.structs.replace(configuration, trainer=msgspec.structs.replace(trainer, precision=chosen))
