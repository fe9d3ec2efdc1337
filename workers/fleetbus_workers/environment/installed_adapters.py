"""Adapters that other packages bring: entry points of the group ``fleetbus.environments``, looked up by name.

A package says in its pyproject.toml ``[project.entry-points."fleetbus.environments"]`` and ``NAME = "MODULE:FUNCTION"``; the
function is ``build(context)``, as in `adapter_context`. Nothing of a package is imported before its environment is asked for.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from fleetbus.errors import UserError

GROUP = "fleetbus.environments"


def find_installed(name: str) -> str | None:
    """MODULE:FUNCTION of the adapter of this name, if a package brings one. Raises `UserError` if several do."""
    found = {entry.value: entry for entry in _list_entries(tuple(sys.path)) if entry.name == name}
    if len(found) > 1:
        packages = " and ".join(sorted(_name_package(entry) for entry in found.values()))
        raise UserError(f"environment {name!r} comes with {packages}: uninstall all but one")
    return next(iter(found), None)


def list_installed() -> list[str]:
    """Names of all adapters that packages bring."""
    return sorted({entry.name for entry in _list_entries(tuple(sys.path))})


@lru_cache(maxsize=1)
def _list_entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Those of the packages on ``path``; finding them reads a file per package."""
    return tuple(entry_points(group=GROUP))


def _name_package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
