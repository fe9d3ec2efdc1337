"""A callable that makes environments, looked at as a class of environments is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fleetbus.errors import UserError


def describe_calls(kind: Callable[[], Any]) -> Any:
    """``kind`` as something that has the calls of an environment as attributes; what is no class is called once, to look at
    what it makes. Raises `UserError` if it cannot be called."""
    if isinstance(kind, type):
        return kind
    try:
        example = kind()
    except Exception as error:  # the caller's code may fail in any way
        raise UserError(f"environment {describe_object(kind)} cannot be created: {type(error).__name__}: {error}") from error
    return _CallableKind(kind, example)


def describe_object(kind: object) -> str:
    """Module and qualified name, of the function inside for a partial, of the class for an instance."""
    while isinstance(kind, functools.partial):
        kind = kind.func
    named = kind if hasattr(kind, "__qualname__") else type(kind)
    return f"{named.__module__}.{named.__qualname__}"


class _CallableKind:
    """A callable with the calls of an environment that it made as attributes, as a class has them."""

    def __init__(self, make: Callable[[], Any], example: object) -> None:
        self._make = make
        self._example = example

    def __call__(self) -> object:
        return self._make()

    def __getattr__(self, name: str) -> object:
        return getattr(self._example, name)
