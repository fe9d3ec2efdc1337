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
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.python_class import check_class, class_factory, device_names
from fleetbus_workers.environment.python_class import load_callable as _load

if TYPE_CHECKING:
    from fleetbus_workers.environment.mcp_connection import Connection
    from fleetbus_workers.environment.mcp_environment import PromptStyle
    from fleetbus_workers.environment.pictures import KeepPicture
    from fleetbus_workers.environment.verifier import Grader

FORMS = (
    "warehouse, scripted[:TURNS], mcp:MODULE:FACTORY, stdio[+reset=TOOL]:COMMAND ARGUMENTS, http:URL[,URL...], fleet[:URL], "
    "openenv:URL, remote-gym[:URL[,URL...]], gym[:ID], colours[:TURNS], reasoning-gym[:DATASET], textarena[:ID], "
    "coding, MODULE:CLASS, pool:MODULE:CLASS, process:KIND:COMMAND, docker:KIND:IMAGE, kubernetes:KIND:IMAGE"
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
    given = _Given(
        spec=spec,
        form=form,
        rest=rest,
        grader=verifier,
        observation_bytes=observation_bytes,
        prompt=prompt,
        settings=configuration or Configuration(),
        keep=keep,
    )
    factory = _over_mcp(given) or _elsewhere(given) or _of_your_own(given)
    if factory is None:
        raise UserError(f"environment {spec!r} is none of: {FORMS}")
    return factory


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A spec in its parts, ``form:rest``, and what its environments are made with."""

    spec: str
    form: str
    rest: str
    grader: Grader
    observation_bytes: int
    prompt: PromptStyle | None
    settings: Configuration
    keep: KeepPicture | None

    @property
    def call_seconds(self) -> float:
        return self.settings.limits.tool_call

    def tools_as(self, style: PromptStyle) -> dict[str, Any]:
        """What every environment over MCP is made with."""
        settings = self.settings.environment
        return {
            "grader": self.grader,
            "prompt": self.prompt or style,
            "observation_bytes": self.observation_bytes,
            "output_chars": settings.output_chars if settings.context_tools else None,
            "keep": self.keep,
        }

    def again(self, spec: str) -> EnvironmentFactory:
        """The factory of another spec, with all else the same."""
        return environment_factory(
            spec,
            verifier=self.grader,
            observation_bytes=self.observation_bytes,
            prompt=self.prompt,
            configuration=self.settings,
            keep=self.keep,
        )


def _over_mcp(given: _Given) -> EnvironmentFactory | None:
    """Environments whose tools are on MCP servers."""
    match given.form:
        case "warehouse" if not given.rest:
            from fleetbus_workers.environment.warehouse.server import serve_task

            return _served_here(given, serve_task, "compact", replayable=True)
        case "mcp" if given.rest:
            serve = _load(given.spec, given.rest)
            return _served_here(given, serve, "fleet", replayable=bool(getattr(serve, "replayable", False)))
        case "stdio":
            return _stdio(given)
        case form if form.startswith("stdio+"):
            return _pooled(given)
        case "http" | "https" if given.rest:
            return _http(given)
        case "fleet":
            from fleetbus_workers.environment.fleet.factory import fleet_factory

            return _Factory(*fleet_factory(given.spec, given.rest, configuration=given.settings, **given.tools_as("fleet")))
    return None


def _elsewhere(given: _Given) -> EnvironmentFactory | None:
    """Environments of other kinds, each with a module of its own."""
    spec, rest, keep = given.spec, given.rest, given.keep
    match given.form:
        case "scripted":
            return _scripted(spec, rest)
        case "openenv" if rest:
            openenv = _adapter(spec, "openenv", "openenv")
            return _Factory(*openenv.openenv_factory(rest, **_graded(given, "fleet")))
        case "coding" if not rest:
            from fleetbus_workers.environment.coding_factory import coding_factory

            return _Factory(*coding_factory(**_graded(given, "compact"), seconds=given.call_seconds))
        case "process" | "docker" | "kubernetes" as provider:
            from fleetbus_workers.environment.providers.forms import server_host

            host = server_host(spec, provider, rest, given.again, given.settings)
            return _Factory(host, host.running)
        case "remote-gym":
            return _Factory(*_adapter(spec, "remote_gym", "remote-gym").remote_gym_factory(rest, keep=keep))
        case "gym":
            return _Factory(_adapter(spec, "gymnasium_environment", "gym").gymnasium_factory(spec, rest, keep=keep), _nothing)
        case "colours":
            return _Factory(_adapter(spec, "colours", "vision").colours_factory(spec, rest, keep=keep), _nothing)
        case "reasoning-gym":
            return _Factory(_adapter(spec, "reasoning_gym_environment", "texts").reasoning_gym_factory(spec, rest), _nothing)
        case "textarena":
            return _Factory(_adapter(spec, "textarena_environment", "texts").textarena_factory(spec, rest), _nothing)
    return None


def _of_your_own(given: _Given) -> EnvironmentFactory | None:
    """A user's own classes, here or in processes."""
    match given.form:
        case "pool" if given.rest:
            return _class_in_processes(given.spec, given.rest, given.settings)
        case form if form and given.rest and form not in ("warehouse", "mcp", "coding", "pool"):
            return _python_class(given.spec, given.settings)
    return None


def _graded(given: _Given, style: PromptStyle) -> dict[str, Any]:
    return {"grader": given.grader, "prompt": given.prompt or style, "observation_bytes": given.observation_bytes}


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
    from fleetbus_workers.environment.scripted import ScriptedEnvironment

    if turns and not (turns.isdecimal() and int(turns) > 0):
        raise UserError(f"environment {spec!r}: the number of turns must be 1 or more, as in scripted:3")
    count = int(turns or 3)
    return _Factory(lambda: ScriptedEnvironment(count), _nothing)


def _served_here(given: _Given, serve: Callable[[Task], Any], style: PromptStyle, *, replayable: bool) -> EnvironmentFactory:
    """Environments over server objects: called directly where that is possible, through a client otherwise."""
    from fleetbus_workers.environment.mcp_client import ClientConnection, ConnectionHost, open_server
    from fleetbus_workers.environment.mcp_connection import DirectConnection, has_default_lifespan
    from fleetbus_workers.environment.mcp_environment import McpEnvironment

    host = ConnectionHost()
    listings: dict[Any, Any] = {}

    def connect(task: Task) -> Connection:
        server = serve(task)
        if has_default_lifespan(server):
            return DirectConnection(server, listings, call_seconds=given.call_seconds)
        return ClientConnection(partial(open_server, server), host, call_seconds=given.call_seconds)

    return _Factory(partial(McpEnvironment, connect, replayable=replayable, **given.tools_as(style)), host.running)


def _http(given: _Given) -> EnvironmentFactory:
    """One or several URLs; a URL alone is understood as well."""
    from fleetbus_workers.environment.mcp_environment import McpEnvironment
    from fleetbus_workers.environment.mcp_factories import http_factory

    make = partial(McpEnvironment, **given.tools_as("fleet"))
    urls = given.spec if given.rest.startswith("//") else given.rest
    return _Factory(*http_factory(given.spec, urls, make, call_seconds=given.call_seconds))


def _pooled(given: _Given) -> EnvironmentFactory:
    from fleetbus_workers.environment.mcp_environment import McpEnvironment
    from fleetbus_workers.environment.mcp_factories import pooled_factory

    key, _, tool = given.form.removeprefix("stdio+").partition("=")
    if key != "reset" or not tool:
        raise UserError(
            f"environment {given.spec!r} must name the tool that resets its server, as in stdio+reset=new_game:COMMAND"
        )
    make = partial(McpEnvironment, **given.tools_as("fleet"))
    return _Factory(*pooled_factory(_split(given.spec, given.rest), tool, make, call_seconds=given.call_seconds))


def _stdio(given: _Given) -> EnvironmentFactory:
    from fleetbus_workers.environment.mcp_client import ClientConnection, ConnectionHost, open_command
    from fleetbus_workers.environment.mcp_environment import McpEnvironment

    command = _split(given.spec, given.rest)
    host = ConnectionHost()

    def connect(_: Task) -> Connection:
        return ClientConnection(partial(open_command, command), host, call_seconds=given.call_seconds)

    return _Factory(partial(McpEnvironment, connect, **given.tools_as("fleet")), host.running)


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
        return importlib.import_module(f"fleetbus_workers.environment.{module}")
    except ModuleNotFoundError as error:
        raise UserError(f"environment {spec!r} needs {error.name}: pip install 'fleetbus[{extra}]'") from error


def _python_class(spec: str, configuration: Configuration) -> EnvironmentFactory:
    kind = _load(spec, spec)
    check_class(spec, kind)
    settings = configuration.environment
    return _Factory(*class_factory(kind, devices=device_names(settings.devices), threads=settings.slots))


def _class_in_processes(spec: str, path: str, configuration: Configuration) -> EnvironmentFactory:
    from fleetbus_workers.environment.pool import ProcessPool

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
