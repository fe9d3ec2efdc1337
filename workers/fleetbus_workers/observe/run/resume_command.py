"""The command that resumes a run, as typed in this working folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from fleetbus.config.settings import RunSettings

_DEFAULTS = RunSettings()


def build_resume_command(name: str, folder: str | Path) -> str:
    """``fleetbus up`` for the run ``name`` in the folder of runs ``folder``; defaults are left out."""
    named = [] if name == _DEFAULTS.name else ["--run", name]
    return shlex.join(["fleetbus", "up", *named, *_format_folder_flag(folder)])


def _format_folder_flag(folder: str | Path) -> list[str]:
    """Empty for the default folder; below the working folder the path is a relative one."""
    here, path = Path.cwd(), Path(folder).expanduser().absolute()
    if path == Path(_DEFAULTS.folder).absolute():
        return []
    return ["--run-folder", str(path.relative_to(here) if path.is_relative_to(here) else path)]
