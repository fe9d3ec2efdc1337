"""The command that goes on with a run, as one types it here."""

from __future__ import annotations

import shlex
from pathlib import Path

from fleetbus.config.settings import RunSettings

_DEFAULTS = RunSettings()


def up_command(name: str, folder: str | Path) -> str:
    """``fleetbus up`` for the run ``name`` in the folder of runs ``folder``; what the defaults say is left out."""
    named = [] if name == _DEFAULTS.name else ["--run", name]
    return shlex.join(["fleetbus", "up", *named, *_folder_flag(folder)])


def _folder_flag(folder: str | Path) -> list[str]:
    """Empty for the default folder; below the working folder the path is a relative one."""
    here, path = Path.cwd(), Path(folder).expanduser().absolute()
    if path == Path(_DEFAULTS.folder).absolute():
        return []
    return ["--run-folder", str(path.relative_to(here) if path.is_relative_to(here) else path)]
