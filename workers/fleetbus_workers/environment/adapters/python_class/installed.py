"""Environments of adapters that other packages bring."""

from __future__ import annotations

from fleetbus.errors import UserError
from fleetbus.user_code import load_callable
from fleetbus_workers.environment.adapter_context import AdapterContext, EnvironmentFactory, Factory
from fleetbus_workers.environment.adapters.python_class.callable_kind import describe_calls
from fleetbus_workers.environment.adapters.python_class.environment import build_from_kind
from fleetbus_workers.environment.own_images import ImageStoringFactory


def build_installed(context: AdapterContext, path: str) -> EnvironmentFactory:
    """Make the factory of ``build(context)`` at ``path``, MODULE:FUNCTION: a class or callable that makes environments,
    as one of the user's own, or a factory that has `run` as well. Images are stored. Raises `UserError`."""
    what = f"environment {context.spec!r}"
    made = load_callable(what, path)(context)
    if not callable(made):
        raise UserError(f"{what}: {path} gave {type(made).__name__}, not a class or callable that makes environments")
    if not isinstance(made, type) and hasattr(made, "run"):
        return Factory(ImageStoringFactory(made, context.store_image), made.run)
    return build_from_kind(context, describe_calls(made))
