"""A user's own class as an environment: asynchronous calls are awaited, others run in threads; devices go round.

A class has the six calls of `Environment` and ``replayable``. Blocking code never blocks the worker; a call that is given up
runs on in its thread, and the next call of that episode waits until it has ended, so that calls never overlap.
"""

import inspect
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FunctionType
from typing import Any

import anyio
import msgspec

from fleetbus.config.settings import EnvironmentSettings
from fleetbus.errors import UserError
from fleetbus.user_code import load_callable
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.call_threads import CallThreads, SerialCalls
from fleetbus_workers.environment.base import Environment, Start, Step, Verdict
from fleetbus_workers.environment.failure_location import locate_class_method
from fleetbus_workers.environment.own_images import ImageStoringFactory
from fleetbus_workers.environment.validation import validate_return

CALLS = ("open", "reset", "step", "state", "verify", "close")
SPARE_THREADS = 8
"""Threads beyond one per episode; those of calls that were given up are counted apart."""


def check_class(spec: str, kind: object) -> None:
    """Raise `UserError` unless ``kind`` looks like an environment."""
    missing = [call for call in (*CALLS, "replayable") if not hasattr(kind, call)]
    if missing:
        is_gym = any(base.__module__.startswith("gymnasium.") for base in getattr(kind, "__mro__", ()))
        hint = "register it with Gymnasium, and write gym:FILE.py:ID" if is_gym else "see fleetbus.Environment"
        if isinstance(kind, FunctionType | partial):
            hint = f"it is a {type(kind).__name__}: name a class whose constructor takes no arguments"
        raise UserError(f"environment {spec!r} is not an environment: it lacks {', '.join(missing)} ({hint})")
    if not isinstance(kind, type):
        return
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        where = locate_class_method(kind, "__init__")
        raise UserError(
            f"environment {spec!r} is called without arguments: {error}{f' ({where})' if where else ''}: read values from "
            "task.config in open, or name a subclass that passes them"
        ) from None
    except ValueError:  # no signature is known
        return


def parse_device_names(text: str) -> tuple[str, ...]:
    """The devices in a setting, as in ``cuda:0, cuda:1``."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)


def is_asynchronous(kind: object) -> bool:
    """True if all calls of a class are coroutine functions."""
    return all(inspect.iscoroutinefunction(getattr(kind, call)) for call in CALLS)


def build(context: AdapterContext) -> Factory:
    """Environments of the class that the spec, MODULE:CLASS, names, also of one for TRL. Raises `UserError`."""
    kind = load_callable(f"environment {context.spec!r}", context.spec)
    if isinstance(kind, type) and hasattr(kind, "get_reward") and not hasattr(kind, "verify"):
        from fleetbus_workers.environment.adapters.mcp.trl_class import build_from_trl_class

        return build_from_trl_class(context, kind)
    return build_from_kind(context, kind)


def build_from_kind(context: AdapterContext, kind: Callable[[], Any]) -> Factory:
    """Environments of a class, whose images are stored. Raises `UserError` if it is none of environments."""
    check_class(context.spec, kind)
    factory = build_class_factory(kind, context.settings.environment)
    return Factory(ImageStoringFactory(factory, context.store_image), factory.run)


def build_class_factory(kind: Callable[[], Any], settings: EnvironmentSettings | None = None) -> Factory:
    """Environments of a class that `check_class` has seen.

    The n-th environment finds the n-th of the settings' devices as ``device`` in its task's config, and round again.
    """
    settings = settings or EnvironmentSettings()
    devices, threads = parse_device_names(settings.devices), settings.slots
    device = itertools.cycle(devices) if devices else None
    is_used_directly = is_asynchronous(kind) and device is None
    shared = [CallThreads()]

    def make() -> Environment:
        if is_used_directly:
            environment: Environment = kind()
            return environment
        return ClassEnvironment(kind, shared[0], next(device) if device else "")

    @asynccontextmanager
    async def run() -> AsyncIterator[None]:
        shared[:] = [CallThreads(anyio.CapacityLimiter(threads + SPARE_THREADS))]
        await anyio.lowlevel.checkpoint()
        yield

    return Factory(make, run)


def assign_device(task: Task, device: str) -> Task:
    """The task, with ``device`` in its config if there is one and the task names none itself."""
    return msgspec.structs.replace(task, config={"device": device} | task.config) if device else task


class ClassEnvironment:
    """One object of a user's class; it is made when it is opened, in a thread if its class has ordinary calls."""

    def __init__(self, kind: Callable[[], object], threads: CallThreads | None, device: str = "") -> None:
        self.replayable = bool(getattr(kind, "replayable", False))
        self._kind = kind
        self._calls = SerialCalls(threads or CallThreads(), kind)
        self._device = device
        self._object: Any = None

    @property
    def implementation(self) -> object:
        """The user's object; None before `open`."""
        return self._object

    async def open(self, task: Task) -> None:
        self._object = self._kind() if is_asynchronous(self._kind) else await self._calls.run(self._kind, "__init__")
        await self._call("open", assign_device(task, self._device))

    async def reset(self) -> Start:
        return validate_return(Start, await self._call("reset"), "reset", self)

    async def step(self, action: Action) -> Step:
        return validate_return(Step, await self._call("step", action), "step", self)

    async def state(self) -> dict[str, Any]:
        return validate_return(dict, await self._call("state"), "state", self)

    async def verify(self) -> Verdict:
        return validate_return(Verdict, await self._call("verify"), "verify", self)

    async def close(self) -> None:
        if self._object is not None:
            await self._call("close")

    async def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._object, name)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await self._calls.run(partial(function, *arguments), name)
