"""The model folder that a run begins with."""

from importlib.resources import files
from pathlib import Path

from fleetbus.config.settings import RunSettings
from fleetbus_workers.assembly.named_models import resolve_model


def find_model_folder(run: RunSettings) -> Path:
    """The folder of the model that was named (see `resolve_model`), or the starter policy that ships. Raises `UserError`."""
    if run.model:
        return resolve_model(run.model)
    return find_starter_folder()


def find_starter_folder() -> Path:
    """The starter policy's folder, without importing what builds it."""
    return Path(str(files("fleetbus_workers.starter"))) / "policy"
