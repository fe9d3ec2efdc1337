"""Callables of the user's, found by name as in ``package.module:name`` or ``folder/file.py:name``."""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fleetbus.errors import UserError

LONGEST_LINE = 200


def load_callable(what: str, path: str) -> Callable[..., Any]:
    """The callable that ``path`` names, also from the current folder. Raises `UserError`, which begins with ``what``."""
    module_name, _, name = path.rpartition(":")
    is_file = module_name.endswith(".py")
    if not name.isidentifier() or not (is_file or all(part.isidentifier() for part in module_name.split("."))):
        raise UserError(f"{what} must name a module and a name in it, as in my_package.my_module:name or file.py:name")
    module = load_module(what, module_name)
    loaded = getattr(module, name, None)
    if loaded is None:
        raise UserError(f"{what}: module {module_name} has no {name!r}")
    if not callable(loaded):
        raise UserError(f"{what}: {name!r} in {module_name} cannot be called")
    return loaded  # type: ignore[no-any-return]


def load_module(what: str, name: str) -> ModuleType:
    """The module of that name, or of the file if it ends in ``.py``, also from the current folder; a file imports what is
    beside it. Raises `UserError`, which begins with ``what``."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        hint = _name_in_package(Path(name)) if "no known parent package" in str(error) and name.endswith(".py") else ""
        raise UserError(f"{what}: cannot import {name}: {describe_error(error)}{hint}") from error


def _import_file(file: Path) -> ModuleType:
    """The module of a file, imported once, under a name that no module on the import path has."""
    file = file.expanduser().absolute()
    name = f"fleetbus_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no file of Python")
    folder = str(file.resolve().parent)  # first on the import path, as `python FILE.py` has it
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_in_package(file: Path) -> str:
    """Says how to name a file that imports others of its package by relative names."""
    file = file.expanduser().resolve()
    root = file.parent.parent
    while (root / "__init__.py").exists():
        root = root.parent
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    return f"; use {module}:NAME{'' if root == Path.cwd() else f' in the folder {root}'}"


def describe_error(error: BaseException) -> str:
    """Its kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:LONGEST_LINE]}" if lines else type(error).__name__
