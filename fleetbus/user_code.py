"""Callables of the user's, found by name as in ``package.module:name``."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from fleetbus.errors import UserError

LONGEST_LINE = 200


def load_callable(what: str, path: str) -> Callable[..., Any]:
    """The callable that ``path`` names, also from the current folder. Raises `UserError`, which begins with ``what``."""
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{what} must name a module and a name in it, as in my_package.my_module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        raise UserError(f"{what}: cannot import {module_name}: {describe_error(error)}") from error
    loaded = getattr(module, name, None)
    if loaded is None:
        raise UserError(f"{what}: module {module_name} has no {name!r}")
    if not callable(loaded):
        raise UserError(f"{what}: {name!r} in {module_name} cannot be called")
    return loaded  # type: ignore[no-any-return]


def describe_error(error: BaseException) -> str:
    """Its kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:LONGEST_LINE]}" if lines else type(error).__name__
