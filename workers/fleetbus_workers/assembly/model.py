"""The model folder that a run begins with."""

from importlib.resources import files
from pathlib import Path

from fleetbus.config.settings import RunSettings


def find_model_folder(run: RunSettings) -> Path:
    """The folder that was named, or the starter policy that ships."""
    if run.model:
        return Path(run.model)
    return find_starter_folder()


def find_starter_folder() -> Path:
    """The starter policy's folder, without importing what builds it."""
    return Path(str(files("fleetbus_workers.starter"))) / "policy"
