"""Builds the starter policy that a configuration asks for: for its environment and its training tasks.

Above it are `fleetbus starter` and recipes of `up`; below it random play and the model. Heavy packages are imported when it is
used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.learner.curriculum import load_split


def check_new_folder(folder: Path) -> None:
    """Raise `UserError` unless a model may be built there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty: name a new folder")


def build_for_environment(
    folder: Path, configuration: Configuration, *, episodes: int, seed: int, report: Callable[[str], None]
) -> dict[str, object]:
    """A starter policy for environment and tasks of a configuration, in a new folder; what was found on the way. Raises
    `UserError`."""
    check_new_folder(folder)
    spec = configuration.run.environment
    tasks, _ = load_split(configuration.run.tasks, configuration.evaluation.held_out)
    try:
        import torch

        from fleetbus_workers.assembly.environments import open_environments
        from fleetbus_workers.starter.environment_starter import build_environment_starter, play_guesses
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'fleetbus[environment,torch]'") from error

    async def play() -> Any:
        async with open_environments(configuration, specs=spec) as factory:
            return await play_guesses(factory, tasks, configuration, episodes=episodes, seed=seed)

    played = anyio.run(play)
    torch.set_num_threads(1)  # matrices of a model this small cost less than the threads' waiting for each other
    return msgspec.structs.asdict(build_environment_starter(folder, played, seed=seed, report=report))
