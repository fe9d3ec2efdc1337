"""Environments by name: what a user writes after ``--environment`` becomes a factory of environments, one per episode.

Above it are the command line and the environment worker; below it one module per kind, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from schemas import Task
from workers.environment.base import Environment
from workers.environment.python_class import check_class, class_factory, device_names
from workers.environment.python_class import load_callable as _load

if TYPE_CHECKING:
    from workers.environment.mcp_connection import Connection
    from workers.environment.mcp_environment import PromptStyle
    from workers.environment.pictures import KeepPicture
    from workers.environment.verifier import Grader

FORMS = (
    "warehouse, scripted[:TURNS], mcp:MODULE:FACTORY, stdio[+reset=TOOL]:COMMAND ARGUMENTS, http:URL[,URL...], fleet[:URL], "
    "openenv:URL, remote-gym[:URL[,URL...]], gym[:ID], reasoning-gym[:DATASET], textarena[:ID], coding, "
    "MODULE:CLASS, pool:MODULE:CLASS, process:KIND:COMMAND, docker:KIND:IMAGE, kubernetes:KIND:IMAGE"
)


class EnvironmentFactory(Protocol):
    """Makes the environment of an episode. `running` is entered around all of them: it holds what outlives an episode."""

    def __call__(self) -> Environment: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...


def environment_factory(
    spec: str,
    *,
    verifier: Grader,
    observation_bytes: int = 32_768,
    prompt: PromptStyle | None = None,
    configuration: Configuration | None = None,
    keep: KeepPicture | None = None,
) -> EnvironmentFactory:
    """The factory for a spec, one of `FORMS`. Raises `UserError` when the spec has no such form or names what is not there.

    ``prompt`` overrides how the policy is told of its tools: briefly for the warehouse, at length elsewhere.
    ``configuration`` has the time limits and whatever else a kind of environment reads of its settings. ``keep`` stores the
    images that environments show; without it a word stands for each.
    """
    form, _, rest = spec.partition(":")
    settings = configuration or Configuration()
    call_seconds = settings.limits.tool_call

    def tools_as(style: PromptStyle) -> dict[str, Any]:
        """What every environment over MCP is made with."""
        return {
            "grader": verifier,
            "prompt": prompt or style,
            "observation_bytes": observation_bytes,
            "output_chars": settings.environment.output_chars if settings.environment.context_tools else None,
            "keep": keep,
        }

    match form:
        case "scripted":
            return _scripted(spec, rest)
        case "warehouse" if not rest:
            from workers.environment.warehouse.server import serve_task

            return _mcp(serve_task, tools_as("compact"), settings, replayable=True)
        case "mcp" if rest:
            factory = _load(spec, rest)
            replayable = bool(getattr(factory, "replayable", False))
            return _mcp(factory, tools_as("fleet"), settings, replayable=replayable)
        case "stdio":
            return _stdio(spec, rest, tools_as("fleet"), settings)
        case _ if form.startswith("stdio+"):
            return _pooled(spec, form, rest, tools_as("fleet"), settings)
        case "http" | "https" if rest:
            return _http(spec, rest, tools_as("fleet"), settings)
        case "openenv" if rest:
            openenv = _adapter(spec, "openenv", "openenv")
            style = prompt or "fleet"
            return _Factory(*openenv.openenv_factory(rest, grader=verifier, prompt=style, observation_bytes=observation_bytes))
        case "fleet":
            return _fleet(spec, rest, tools_as("fleet"), settings)
        case "coding" if not rest:
            from workers.environment.coding_factory import coding_factory

            bytes_shown, style = observation_bytes, prompt or "compact"
            return _Factory(*coding_factory(grader=verifier, prompt=style, observation_bytes=bytes_shown, seconds=call_seconds))
        case "process" | "docker" | "kubernetes":
            from workers.environment.providers.forms import server_host

            inner = partial(
                environment_factory,
                verifier=verifier,
                observation_bytes=observation_bytes,
                prompt=prompt,
                configuration=settings,
                keep=keep,
            )
            host = server_host(spec, form, rest, inner, settings)
            return _Factory(host, host.running)
        case "pool" if rest:
            return _class_in_processes(spec, rest, settings)
        case "remote-gym":
            remote_gym = _adapter(spec, "remote_gym", "remote-gym")
            return _Factory(*remote_gym.remote_gym_factory(rest, keep=keep))
        case "gym":
            return _Factory(_adapter(spec, "gymnasium_environment", "gym").gymnasium_factory(spec, rest, keep=keep), _nothing)
        case "reasoning-gym":
            return _Factory(_adapter(spec, "reasoning_gym_environment", "texts").reasoning_gym_factory(spec, rest), _nothing)
        case "textarena":
            return _Factory(_adapter(spec, "textarena_environment", "texts").textarena_factory(spec, rest), _nothing)
        case _ if form and rest and form not in ("warehouse", "mcp", "coding", "pool"):
            return _python_class(spec, settings)
    raise UserError(f"environment {spec!r} is none of: {FORMS}")


class _Factory:
    """A factory from its parts."""

    def __init__(self, make: Callable[[], Environment], running: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._make = make
        self.running = running

    def __call__(self) -> Environment:
        return self._make()


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    await anyio.lowlevel.checkpoint()
    yield


def _scripted(spec: str, turns: str) -> EnvironmentFactory:
    from workers.environment.scripted import ScriptedEnvironment

    if turns and not (turns.isdecimal() and int(turns) > 0):
        raise UserError(f"environment {spec!r}: the number of turns must be 1 or more, as in scripted:3")
    count = int(turns or 3)
    return _Factory(lambda: ScriptedEnvironment(count), _nothing)


def _mcp(
    serve: Callable[[Task], Any], options: dict[str, Any], settings: Configuration, *, replayable: bool
) -> EnvironmentFactory:
    """Environments over server objects: called directly where that is possible, through a client otherwise."""
    from workers.environment.mcp_client import ClientConnection, ConnectionHost, open_server
    from workers.environment.mcp_connection import DirectConnection, has_default_lifespan
    from workers.environment.mcp_environment import McpEnvironment

    host = ConnectionHost()
    listings: dict[Any, Any] = {}

    def connect(task: Task) -> Connection:
        server = serve(task)
        if has_default_lifespan(server):
            return DirectConnection(server, listings, call_seconds=settings.limits.tool_call)
        return ClientConnection(partial(open_server, server), host, call_seconds=settings.limits.tool_call)

    return _Factory(
        lambda: McpEnvironment(connect, replayable=replayable, **options),
        host.running,
    )


def _fleet(spec: str, address: str, options: dict[str, Any], configuration: Configuration) -> EnvironmentFactory:
    from workers.environment.fleet.factory import fleet_factory

    return _Factory(*fleet_factory(spec, address, configuration=configuration, **options))


def _http(spec: str, rest: str, options: dict[str, Any], settings: Configuration) -> EnvironmentFactory:
    """One or several URLs; a URL alone is understood as well."""
    from workers.environment.mcp_environment import McpEnvironment
    from workers.environment.mcp_factories import http_factory

    make = partial(McpEnvironment, **options)
    return _Factory(*http_factory(spec, spec if rest.startswith("//") else rest, make, call_seconds=settings.limits.tool_call))


def _pooled(spec: str, form: str, rest: str, options: dict[str, Any], settings: Configuration) -> EnvironmentFactory:
    from workers.environment.mcp_environment import McpEnvironment
    from workers.environment.mcp_factories import pooled_factory

    key, _, tool = form.removeprefix("stdio+").partition("=")
    if key != "reset" or not tool:
        raise UserError(f"environment {spec!r} must name the tool that resets its server, as in stdio+reset=new_game:COMMAND")
    make = partial(McpEnvironment, **options)
    return _Factory(*pooled_factory(_split(spec, rest), tool, make, call_seconds=settings.limits.tool_call))


def _stdio(spec: str, command_line: str, options: dict[str, Any], settings: Configuration) -> EnvironmentFactory:
    from workers.environment.mcp_client import ClientConnection, ConnectionHost, open_command
    from workers.environment.mcp_environment import McpEnvironment

    command = _split(spec, command_line)
    host = ConnectionHost()
    return _Factory(
        lambda: McpEnvironment(
            lambda _: ClientConnection(partial(open_command, command), host, call_seconds=settings.limits.tool_call),
            **options,
        ),
        host.running,
    )


def _split(spec: str, command_line: str) -> Sequence[str]:
    try:
        command = shlex.split(command_line)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    if not command:
        raise UserError(f"environment {spec!r} names no command, as in stdio:python -m my_server")
    if shutil.which(command[0]) is None:
        raise UserError(f"environment {spec!r}: there is no command {command[0]!r}; install it or give its path")
    return command


def _adapter(spec: str, module: str, extra: str) -> Any:
    """A module of this package that needs packages beyond the usual ones."""
    try:
        return importlib.import_module(f"workers.environment.{module}")
    except ModuleNotFoundError as error:
        raise UserError(f"environment {spec!r} needs {error.name}: pip install 'fleetbus[{extra}]'") from error


def _python_class(spec: str, configuration: Configuration) -> EnvironmentFactory:
    kind = _load(spec, spec)
    check_class(spec, kind)
    settings = configuration.environment
    return _Factory(*class_factory(kind, devices=device_names(settings.devices), threads=settings.slots))


def _class_in_processes(spec: str, path: str, configuration: Configuration) -> EnvironmentFactory:
    from workers.environment.pool import ProcessPool

    kind = _load(spec, path)
    check_class(spec, kind)
    settings = configuration.environment
    pool = ProcessPool(
        path,
        processes=settings.processes or settings.slots,
        devices=device_names(settings.devices),
        replayable=bool(getattr(kind, "replayable", False)),
    )
    return _Factory(pool, pool.running)
