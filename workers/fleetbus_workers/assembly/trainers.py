"""The trainer that the configuration names."""

from fleetbus.config.settings import Configuration
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings


def build_trainer_settings(configuration: Configuration) -> TorchTrainerSettings:
    """The tables of the configuration that the torch trainer reads."""
    return TorchTrainerSettings(
        learner=configuration.learner,
        algorithm=configuration.algorithm,
        trainer=configuration.trainer,
        images=configuration.environment.images,
    )
