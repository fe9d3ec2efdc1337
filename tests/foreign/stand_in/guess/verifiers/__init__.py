"""A stand-in for the package of this name, with as much of v0 as the runner calls, over the standard library."""

from __future__ import annotations

import importlib
from typing import Any


def load_environment(name: str, **arguments: Any) -> Any:
    return importlib.import_module(name).load_environment(**arguments)
