"""Environments by name: what a user writes after ``--environment`` becomes a factory of environments, one per episode.

Above it are the command line and the environment worker; below it one module per kind, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.python_class.environment import build_class_factory, check_class, parse_device_names
from fleetbus_workers.environment.adapters.python_class.environment import load_callable as _load
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.own_images import Showing

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.connection import Connection
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle
    from fleetbus_workers.environment.images.observation import StoreImage
    from fleetbus_workers.environment.isolation.verifier import Grader

SPEC_FORMS = (
    "warehouse, scripted[:TURNS], mcp:MODULE:FACTORY, stdio[+reset=TOOL]:COMMAND ARGUMENTS, http:URL[,URL...], fleet[:URL], "
    "openenv:URL, remote-gym[:URL[,URL...]], gym[:ID], colours[:TURNS], reasoning-gym[:DATASET], textarena[:ID], "
    "coding, MODULE:CLASS, pool:MODULE:CLASS, process:KIND:COMMAND, docker:KIND:IMAGE, kubernetes:KIND:IMAGE"
)


PYTHON_OBJECT = "python-object"
"""The form that stands in the settings of a run whose environment is a class or callable of the program that started it."""


class EnvironmentFactory(Protocol):
    """Makes the environment of an episode. `running` is entered around all of them: it holds what outlives an episode."""

    def __call__(self) -> Environment: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...


def build_environment_factory(
    spec: str,
    *,
    verifier: Grader,
    observation_bytes: int = 32_768,
    prompt: PromptStyle | None = None,
    configuration: Configuration | None = None,
    store_image: StoreImage | None = None,
) -> EnvironmentFactory:
    """The factory for a spec, one of `SPEC_FORMS`. Raises `UserError` when the spec has no such form or names a missing thing.

    ``prompt`` overrides how tools are described to the policy: briefly for the warehouse, at length elsewhere.
    ``configuration`` has the time limits and the settings of each kind of environment. ``store_image`` stores the
    images that environments show; without it a placeholder text replaces each.
    """
    form, _, rest = spec.partition(":")
    if form == PYTHON_OBJECT:
        raise UserError(f"the environment of this run is {rest} of a Python program: run that program, or its fleetbus.train")
    context = _SpecContext(
        spec=spec,
        form=form,
        rest=rest,
        grader=verifier,
        observation_bytes=observation_bytes,
        prompt=prompt,
        settings=configuration or Configuration(),
        store_image=store_image,
    )
    factory = _build_mcp_factory(context) or _build_adapter_factory(context) or _build_user_factory(context)
    if factory is None:
        raise UserError(f"environment {spec!r} is none of: {SPEC_FORMS}")
    return factory


@dataclass(frozen=True, kw_only=True)
class _SpecContext:
    """A spec in its parts, ``form:rest``, and what its environments are made with."""

    spec: str
    form: str
    rest: str
    grader: Grader
    observation_bytes: int
    prompt: PromptStyle | None
    settings: Configuration
    store_image: StoreImage | None

    @property
    def call_seconds(self) -> float:
        return self.settings.limits.tool_call

    def mcp_arguments(self, style: PromptStyle) -> dict[str, Any]:
        """What every environment over MCP is made with."""
        settings = self.settings.environment
        return {
            "grader": self.grader,
            "prompt": self.prompt or style,
            "observation_bytes": self.observation_bytes,
            "output_chars": settings.output_chars if settings.context_tools else None,
            "store_image": self.store_image,
        }

    def build_factory(self, spec: str) -> EnvironmentFactory:
        """The factory of another spec, with all else the same."""
        return build_environment_factory(
            spec,
            verifier=self.grader,
            observation_bytes=self.observation_bytes,
            prompt=self.prompt,
            configuration=self.settings,
            store_image=self.store_image,
        )


def _build_mcp_factory(context: _SpecContext) -> EnvironmentFactory | None:
    """Environments whose tools are on MCP servers."""
    match context.form:
        case "warehouse" if not context.rest:
            from fleetbus_workers.environment.adapters.warehouse.server import serve_task

            return _build_in_process_mcp(context, serve_task, "compact", replayable=True)
        case "mcp" if context.rest:
            serve = _load(context.spec, context.rest)
            return _build_in_process_mcp(context, serve, "fleet", replayable=bool(getattr(serve, "replayable", False)))
        case "stdio":
            return _build_stdio_mcp(context)
        case form if form.startswith("stdio+"):
            return _build_pooled_mcp(context)
        case "http" | "https" if context.rest:
            return _build_http_mcp(context)
        case "fleet":
            from fleetbus_workers.environment.adapters.fleet.factory import build_fleet_factory

            return _Factory(
                *build_fleet_factory(
                    context.spec, context.rest, configuration=context.settings, **context.mcp_arguments("fleet")
                )
            )
    return None


def _build_adapter_factory(context: _SpecContext) -> EnvironmentFactory | None:
    """Environments of other kinds, each with a module of its own."""
    spec, rest, store_image = context.spec, context.rest, context.store_image
    match context.form:
        case "scripted":
            return _build_scripted(spec, rest)
        case "openenv" if rest:
            openenv = _import_adapter(spec, "openenv.environment", "openenv")
            return _Factory(*openenv.build_openenv_factory(rest, **_grading_arguments(context, "fleet")))
        case "coding" if not rest:
            from fleetbus_workers.environment.adapters.coding.factory import build_coding_factory

            return _Factory(*build_coding_factory(**_grading_arguments(context, "compact"), seconds=context.call_seconds))
        case "process" | "docker" | "kubernetes" as provider:
            from fleetbus_workers.environment.adapters.providers.factory import build_server_host

            host = build_server_host(spec, provider, rest, context.build_factory, context.settings)
            return _Factory(host, host.running)
        case "remote-gym":
            return _Factory(
                *_import_adapter(spec, "remote_gym.environment", "remote-gym").build_remote_gym_factory(
                    rest, store_image=store_image
                )
            )
        case "gym":
            return _Factory(
                _import_adapter(spec, "gymnasium.environment", "gym").build_gymnasium_factory(
                    spec, rest, store_image=store_image
                ),
                _hold_nothing,
            )
        case "colours":
            return _Factory(
                _import_adapter(spec, "colours", "vision").build_colours_factory(spec, rest, store_image=store_image),
                _hold_nothing,
            )
        case "reasoning-gym":
            return _Factory(
                _import_adapter(spec, "reasoning_gym", "texts").build_reasoning_gym_factory(spec, rest), _hold_nothing
            )
        case "textarena":
            return _Factory(_import_adapter(spec, "textarena", "texts").build_textarena_factory(spec, rest), _hold_nothing)
    return None


def _build_user_factory(context: _SpecContext) -> EnvironmentFactory | None:
    """A user's own classes, here or in processes."""
    match context.form:
        case "pool" if context.rest:
            return _build_process_pool(context.spec, context.rest, context.settings, context.store_image)
        case form if form and context.rest and form not in ("warehouse", "mcp", "coding", "pool"):
            return _build_python_class(context.spec, context.settings, context.store_image)
    return None


def _grading_arguments(context: _SpecContext, style: PromptStyle) -> dict[str, Any]:
    return {"grader": context.grader, "prompt": context.prompt or style, "observation_bytes": context.observation_bytes}


class _Factory:
    """A factory from its parts."""

    def __init__(self, make: Callable[[], Environment], running: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._make = make
        self.running = running

    def __call__(self) -> Environment:
        return self._make()


@asynccontextmanager
async def _hold_nothing() -> AsyncIterator[None]:
    await anyio.lowlevel.checkpoint()
    yield


def _build_scripted(spec: str, turns: str) -> EnvironmentFactory:
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment

    if turns and not (turns.isdecimal() and int(turns) > 0):
        raise UserError(f"environment {spec!r}: the number of turns must be 1 or more, as in scripted:3")
    count = int(turns or 3)
    return _Factory(lambda: ScriptedEnvironment(count), _hold_nothing)


def _build_in_process_mcp(
    context: _SpecContext, serve: Callable[[Task], Any], style: PromptStyle, *, replayable: bool
) -> EnvironmentFactory:
    """Environments over server objects: called directly where that is possible, through a client otherwise."""
    from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_server
    from fleetbus_workers.environment.adapters.mcp.connection import DirectConnection, has_default_lifespan
    from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment

    host = ConnectionHost()
    listings: dict[Any, Any] = {}

    def connect(task: Task) -> Connection:
        server = serve(task)
        if has_default_lifespan(server):
            return DirectConnection(server, listings, call_seconds=context.call_seconds)
        return ClientConnection(partial(open_server, server), host, call_seconds=context.call_seconds)

    return _Factory(partial(McpEnvironment, connect, replayable=replayable, **context.mcp_arguments(style)), host.running)


def _build_http_mcp(context: _SpecContext) -> EnvironmentFactory:
    """One or several URLs; a URL alone is understood as well."""
    from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
    from fleetbus_workers.environment.adapters.mcp.factories import build_http_factory

    make = partial(McpEnvironment, **context.mcp_arguments("fleet"))
    urls = context.spec if context.rest.startswith("//") else context.rest
    return _Factory(*build_http_factory(context.spec, urls, make, call_seconds=context.call_seconds))


def _build_pooled_mcp(context: _SpecContext) -> EnvironmentFactory:
    from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
    from fleetbus_workers.environment.adapters.mcp.factories import build_pooled_factory

    key, _, tool = context.form.removeprefix("stdio+").partition("=")
    if key != "reset" or not tool:
        raise UserError(
            f"environment {context.spec!r} must name the tool that resets its server, as in stdio+reset=new_game:COMMAND"
        )
    make = partial(McpEnvironment, **context.mcp_arguments("fleet"))
    return _Factory(
        *build_pooled_factory(_split_command(context.spec, context.rest), tool, make, call_seconds=context.call_seconds)
    )


def _build_stdio_mcp(context: _SpecContext) -> EnvironmentFactory:
    from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_command
    from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment

    command = _split_command(context.spec, context.rest)
    host = ConnectionHost()

    def connect(_: Task) -> Connection:
        return ClientConnection(partial(open_command, command), host, call_seconds=context.call_seconds)

    return _Factory(partial(McpEnvironment, connect, **context.mcp_arguments("fleet")), host.running)


def _split_command(spec: str, command_line: str) -> Sequence[str]:
    try:
        command = shlex.split(command_line)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    if not command:
        raise UserError(f"environment {spec!r} names no command, as in stdio:python -m my_server")
    if shutil.which(command[0]) is None:
        raise UserError(f"environment {spec!r}: there is no command {command[0]!r}; install it or give its path")
    return command


def _import_adapter(spec: str, module: str, extra: str) -> Any:
    """A module of this package that needs packages beyond the usual ones."""
    try:
        return importlib.import_module(f"fleetbus_workers.environment.adapters.{module}")
    except ModuleNotFoundError as error:
        raise UserError(f"environment {spec!r} needs {error.name}: pip install 'fleetbus[{extra}]'") from error


def _build_python_class(spec: str, configuration: Configuration, store_image: StoreImage | None) -> EnvironmentFactory:
    kind = _load(spec, spec)
    check_class(spec, kind)
    settings = configuration.environment
    make, running = build_class_factory(kind, devices=parse_device_names(settings.devices), threads=settings.slots)
    return _Factory(Showing(make, store_image), running)


def _build_process_pool(
    spec: str, path: str, configuration: Configuration, store_image: StoreImage | None
) -> EnvironmentFactory:
    from fleetbus_workers.environment.adapters.python_class.process_pool import ProcessPool

    kind = _load(spec, path)
    check_class(spec, kind)
    settings = configuration.environment
    pool = ProcessPool(
        path,
        processes=settings.processes or settings.slots,
        devices=parse_device_names(settings.devices),
        replayable=bool(getattr(kind, "replayable", False)),
    )
    return _Factory(Showing(pool, store_image), pool.running)
