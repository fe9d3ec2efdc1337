"""A class or callable of the caller's as the environment of a run: checked, named for the run's settings, made a factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.python_class.callable_kind import describe_calls, describe_object
from fleetbus_workers.environment.adapters.python_class.environment import build_class_factory, check_class
from fleetbus_workers.environment.specs import PYTHON_OBJECT

Factory = Callable[[], Any]


def build_object_factory(kind: Factory, configuration: Configuration) -> EnvironmentFactory:
    """Makes the environments of one worker out of ``kind``: it is what an environment worker takes as its factory."""
    return build_class_factory(describe_calls(kind), configuration.environment)


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
    check_class(name, describe_calls(kind))


def build_object_spec(kind: Factory) -> str:
    """The value of ``run.environment`` for an object: its name, the same whenever the same program is started again."""
    return f"{PYTHON_OBJECT}:{describe_object(kind)}"
