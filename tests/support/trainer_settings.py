"""Settings of the torch trainer by their own names, whichever table they stand in."""

from __future__ import annotations

from typing import Any

from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, TrainerSettings
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings

TABLES: dict[str, type[Any]] = {"learner": LearnerSettings, "algorithm": AlgorithmSettings, "trainer": TrainerSettings}


def trainer_settings(**given: Any) -> TorchTrainerSettings:
    """Settings that are not given have their defaults, but losses are averaged over tokens, whose gradients are the simplest to
    write down independently."""
    given.setdefault("reduction", "token_mean")
    tables = {
        table: kind(**{name: given.pop(name) for name in kind.__struct_fields__ if name in given})
        for table, kind in TABLES.items()
    }
    return TorchTrainerSettings(**tables, **given)
