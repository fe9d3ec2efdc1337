"""A class or callable of the caller's as the environment of a run: checked, named for the run's settings, made a factory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.python_class.environment import build_class_factory, check_class, parse_device_names
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.specs import PYTHON_OBJECT

Factory = Callable[[], Any]


class ObjectFactory:
    """Makes the environments of one worker out of ``kind``: it is what an environment worker takes as its factory."""

    def __init__(self, kind: Factory, configuration: Configuration) -> None:
        settings = configuration.environment
        self._make, self._running = build_class_factory(
            _describe_calls(kind), devices=parse_device_names(settings.devices), threads=settings.slots
        )

    def __call__(self) -> Environment:
        return self._make()

    def run(self) -> AbstractAsyncContextManager[None]:
        return self._running()


class _CallableKind:
    """A callable that makes environments, with the calls of one of them as attributes, as a class has them."""

    def __init__(self, make: Factory, example: object) -> None:
        self._make = make
        self._example = example

    def __call__(self) -> object:
        return self._make()

    def __getattr__(self, name: str) -> object:
        return getattr(self._example, name)


def check_environment_object(kind: object) -> None:
    """Raise `UserError` unless ``kind`` is a class or callable without arguments that makes environments. A callable is
    called once, to look at what it makes."""
    name = describe_object(kind)
    if not callable(kind):
        raise UserError(f"environment is {name}, which cannot be called: give a SPEC, a class, or a callable without arguments")
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise UserError(
            f"environment {name} needs arguments ({error}): give a callable without any, as functools.partial({name}, ...)"
        ) from None
    except ValueError:  # a callable without a signature: making one shows what is wrong
        pass
    check_class(name, _describe_calls(kind))


def build_object_spec(kind: Factory) -> str:
    """The value of ``run.environment`` for an object: its name, the same whenever the same program is started again."""
    return f"{PYTHON_OBJECT}:{describe_object(kind)}"


def describe_object(kind: object) -> str:
    """Module and qualified name, of the function inside for a partial, of the class for an instance."""
    while isinstance(kind, functools.partial):
        kind = kind.func
    named = kind if hasattr(kind, "__qualname__") else type(kind)
    return f"{named.__module__}.{named.__qualname__}"


def _describe_calls(kind: Factory) -> Any:
    """``kind`` as something that has the calls of an environment as attributes. Raises `UserError` if it cannot be called."""
    if isinstance(kind, type):
        return kind
    try:
        example = kind()
    except Exception as error:  # the caller's code may fail in any way
        raise UserError(f"environment {describe_object(kind)} cannot be created: {type(error).__name__}: {error}") from error
    return _CallableKind(kind, example)
