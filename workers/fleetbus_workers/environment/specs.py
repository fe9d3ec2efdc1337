"""Environments by name: what a user writes after ``--environment`` becomes a factory of environments, one per episode.

`ADAPTERS` is the list of kinds: the help of commands, the docs and error messages print from it. Above it are the command line
and the environment worker; below it one module per kind, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.common.task_permissions import TaskPermissions, read_permissions
from fleetbus_workers.environment.base import Environment

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle
    from fleetbus_workers.environment.images.observation import StoreImage
    from fleetbus_workers.environment.isolation.verifier import Grader


PYTHON_OBJECT = "python-object"
"""The form that stands in the settings of a run whose environment is a class or callable of the program that started it."""


class EnvironmentFactory(Protocol):
    """Makes the environment of an episode. `run` is entered around all of them: it holds what outlives an episode."""

    def __call__(self) -> Environment: ...

    def run(self) -> AbstractAsyncContextManager[None]: ...


@asynccontextmanager
async def _hold_nothing() -> AsyncIterator[None]:
    await anyio.lowlevel.checkpoint()
    yield


class Factory:
    """A factory from its parts."""

    def __init__(
        self, make: Callable[[], Environment], run: Callable[[], AbstractAsyncContextManager[None]] = _hold_nothing
    ) -> None:
        self._make = make
        self.run = run

    def __call__(self) -> Environment:
        return self._make()


@dataclass(frozen=True, kw_only=True)
class AdapterContext:
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

    @property
    def permissions(self) -> TaskPermissions:
        return read_permissions(self.settings.environment)

    def grading_arguments(self, style: PromptStyle) -> dict[str, Any]:
        """The arguments of every environment with tools and a verifier."""
        return {"grader": self.grader, "prompt": self.prompt or style, "observation_bytes": self.observation_bytes}

    def mcp_arguments(self, style: PromptStyle) -> dict[str, Any]:
        """The arguments of every environment over MCP."""
        settings = self.settings.environment
        output_chars = settings.output_chars if settings.context_tools else None
        return {
            **self.grading_arguments(style),
            "output_chars": output_chars,
            "parallel_calls": settings.parallel_calls,
            "store_image": self.store_image,
        }

    def build_factory(self, spec: str) -> EnvironmentFactory:
        """The factory of another spec, with all else the same."""
        form, _, rest = spec.partition(":")
        return _build(replace(self, spec=spec, form=form, rest=rest))


class Adapter(NamedTuple):
    """One kind of environment. ``forms`` is how it is written; ``module`` (below `adapters`) needs the packages of ``extra``.

    ``build`` gets the module. It is asked only for a spec with something after the colon if ``forms`` has a bare ``:``, and
    for one without a colon if it has none; an adapter ``checks_rest`` when its own message says more. ``task_key``: what has to
    stand in the config of every task where nothing follows the name.
    """

    forms: str
    module: str
    extra: str
    description: str
    build: Callable[[Any, AdapterContext], EnvironmentFactory]
    checks_rest: bool = False
    task_key: str = ""

    @property
    def name(self) -> str:
        return self.forms.partition(":")[0].partition("[")[0]

    def accepts(self, colon: str, rest: str) -> bool:
        """True if ``colon`` (or nothing) and ``rest`` may follow the name in a spec of this kind."""
        if self.checks_rest:
            return True
        if not colon:
            return "[:" in self.forms or ":" not in self.forms
        return bool(rest.strip()) and ":" in self.forms


def _build_host(module: Any, context: AdapterContext) -> EnvironmentFactory:
    host = module.build_server_host(context.spec, context.form, context.rest, context.build_factory, context.settings)
    return Factory(host, host.run)


def _store_images(factory: EnvironmentFactory, context: AdapterContext) -> EnvironmentFactory:
    """The same for classes that give images in `Start` and `Step`."""
    from fleetbus_workers.environment.own_images import ImageStoringFactory  # imports structlog, which help does without

    return Factory(ImageStoringFactory(factory, context.store_image), factory.run)


ADAPTERS = (
    Adapter(
        "warehouse", "mcp.factories", "environment", "tools over a small database; the default",
        lambda mcp, context: mcp.build_warehouse_factory(context),
    ),
    Adapter(
        "scripted[:TURNS]", "scripted", "", "nothing outside: a fixed number of turns, for benchmarks",
        lambda scripted, context: Factory(scripted.build_scripted_factory(context.spec, context.rest)),
    ),
    Adapter(
        "mcp:MODULE:FACTORY", "mcp.factories", "environment", "an MCP server object that your function makes",
        lambda mcp, context: mcp.build_object_factory(context),
    ),
    Adapter(
        "stdio[+reset=TOOL]:COMMAND ARGUMENTS", "mcp.factories", "environment",
        "an MCP server as a process per episode, or kept and reset with a tool of its own",
        lambda mcp, context: mcp.build_command_factory(context), checks_rest=True,
    ),
    Adapter(
        "http:URL[,URL...]", "mcp.factories", "environment", "MCP servers over streamable HTTP",
        lambda mcp, context: mcp.build_http_factory(context),
    ),
    Adapter(
        "fleet[:URL]", "fleet.factory", "fleet", "instances on the Fleet platform",
        lambda fleet, context: Factory(
            *fleet.build_fleet_factory(
                context.spec, context.rest, configuration=context.settings, **context.mcp_arguments("fleet")
            )
        ),
    ),
    Adapter(
        "openenv:URL", "openenv.environment", "openenv", "an OpenEnv 0.10 server",
        lambda openenv, context: Factory(*openenv.build_openenv_factory(context.rest, **context.grading_arguments("fleet"))),
    ),
    Adapter(
        "remote-gym[:URL[,URL...]]", "remote_gym.environment", "remote-gym",
        "servers of the remote-gym protocol (multipart over HTTP)",
        lambda remote, context: Factory(
            *remote.build_remote_gym_factory(context.rest, store_image=context.store_image, permissions=context.permissions)
        ),
        task_key="base_urls",
    ),
    Adapter(
        "gym[:ID]", "gymnasium.environment", "gym", "any registered Gymnasium environment",
        lambda gym, context: Factory(
            gym.build_gymnasium_factory(
                context.spec, context.rest, store_image=context.store_image, permissions=context.permissions
            )
        ),
        task_key="id",
    ),
    Adapter(
        "colours[:TURNS]", "colours", "vision", "questions about small pictures, for models that see",
        lambda colours, context: Factory(
            colours.build_colours_factory(context.spec, context.rest, store_image=context.store_image)
        ),
    ),
    Adapter(
        "reasoning-gym[:DATASET]", "reasoning_gym", "texts", "questions that are made and scored",
        lambda texts, context: Factory(texts.build_reasoning_gym_factory(context.spec, context.rest)),
        task_key="dataset",
    ),
    Adapter(
        "textarena[:ID]", "textarena", "texts", "text games for one player",
        lambda texts, context: Factory(texts.build_textarena_factory(context.spec, context.rest)),
        task_key="id",
    ),
    Adapter(
        "coding", "coding.factory", "", "Python in a sandbox: bubblewrap (Debian package), or user namespaces",
        lambda coding, context: Factory(
            *coding.build_coding_factory(**context.grading_arguments("compact"), seconds=context.call_seconds)
        ),
    ),
    Adapter(
        "harbor:DIR", "harbor.factory", "", "Harbor tasks: a shell in a container (`fleetbus[docker]`) or in the sandbox",
        lambda harbor, context: harbor.build_harbor_factory(context),
    ),
    Adapter(
        "agent:SPEC", "agent.factory", "agents",
        "an agent that owns its loop: a command, or MODULE:FUNCTION, whose model calls are the turns",
        lambda agent, context: agent.build_agent_factory(context), checks_rest=True,
    ),
    Adapter(
        "MODULE:CLASS", "python_class.environment", "", "a class of your own, in this process",
        lambda python, context: _store_images(
            Factory(*python.build_named_class_factory(context.spec, context.settings.environment)), context
        ),
    ),
    Adapter(
        "pool:MODULE:CLASS", "python_class.process_pool", "", "a class of your own, in several processes",
        lambda python, context: _store_images(
            python.build_process_pool(context.spec, context.rest, context.settings.environment), context
        ),
    ),
    Adapter(
        "process:KIND:COMMAND", "providers.factory", "", "a server that is started for each episode", _build_host, True,
    ),
    Adapter(
        "docker:KIND:IMAGE", "providers.factory", "docker", "a container that is started for each episode", _build_host, True,
    ),
    Adapter(
        "kubernetes:KIND:IMAGE", "providers.factory", "kubernetes", "a Job that is started for each episode", _build_host, True,
    ),
)  # fmt: skip
"""Every kind of environment, in the order in which help and docs show them."""

SPEC_FORMS = ", ".join(adapter.forms for adapter in ADAPTERS)

_BY_NAME = {adapter.name: adapter for adapter in ADAPTERS}
_BY_NAME |= {"https": _BY_NAME["http"]}


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
    return _build(
        AdapterContext(
            spec=spec,
            form=form,
            rest=rest,
            grader=verifier,
            observation_bytes=observation_bytes,
            prompt=prompt,
            settings=configuration or Configuration(),
            store_image=store_image,
        )
    )


def find_adapter(spec: str) -> Adapter:
    """The kind of environment that a spec names. Raises `UserError` for a spec that is not written as its kind is; nothing is
    imported."""
    form, colon, rest = spec.partition(":")
    name = form.partition("+")[0] if form.startswith("stdio+") else form
    adapter = _BY_NAME.get(name)
    if adapter is None:
        if not name or not rest.strip():
            raise UserError(f"environment {spec!r} is none of: {SPEC_FORMS}")
        return _BY_NAME["MODULE"]
    if not adapter.accepts(colon, rest):
        raise UserError(f"environment {spec!r} must be written as {adapter.forms}")
    return adapter


def check_task_configs(spec: str, tasks: Iterable[Task]) -> None:
    """Raise `UserError` if one of the tasks that ``spec`` serves does not name what the spec leaves to it."""
    adapter = find_adapter(spec)
    if ":" in spec or not adapter.task_key:
        return
    for task in tasks:
        if not task.config.get(adapter.task_key):
            written = adapter.forms.replace("[:", ":", 1).removesuffix("]")
            raise UserError(
                f"environment {spec!r}: task {task.key} has no {adapter.task_key} in its config; add it, or write {written}"
            )


def _build(context: AdapterContext) -> EnvironmentFactory:
    adapter = find_adapter(context.spec)
    try:
        module = importlib.import_module(f"fleetbus_workers.environment.adapters.{adapter.module}")
    except ModuleNotFoundError as error:
        if not adapter.extra:
            raise
        raise UserError(f"environment {context.spec!r} needs {error.name}: pip install 'fleetbus[{adapter.extra}]'") from error
    return adapter.build(module, context)


def is_own_class(spec: str) -> bool:
    """True if a spec names a class of the user's own, played in the worker's process."""
    form, _, rest = spec.partition(":")
    return bool(rest) and form not in _BY_NAME and not form.startswith("stdio+") and form != PYTHON_OBJECT


def format_markdown_table() -> str:
    """The kinds as docs/environments.md shows them."""
    rows = (
        f"| `{each.forms}` | {each.description} | {f'`fleetbus[{each.extra}]`' if each.extra else ''} |\n" for each in ADAPTERS
    )
    return "| SPEC | what it is | install |\n|---|---|---|\n" + "".join(rows)
