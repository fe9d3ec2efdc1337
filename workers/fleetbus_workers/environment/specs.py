"""Environments by name: what a user writes after ``--environment`` becomes a factory of environments, one per episode.

`ADAPTERS` is the list of kinds: the help of commands, the docs and error messages print from it. Above it are the command line
and the environment worker; below it one module per kind, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import AdapterContext, EnvironmentFactory
from fleetbus_workers.environment.installed_adapters import find_installed, list_installed

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle
    from fleetbus_workers.environment.images.observation import StoreImage
    from fleetbus_workers.environment.isolation.verifier import Grader

Build = Callable[[AdapterContext], EnvironmentFactory]
"""What each adapter has: a factory of environments out of their context. Raises `UserError`."""

PYTHON_OBJECT = "python-object"
"""The form that stands in the settings of a run whose environment is a class or callable of the program that started it."""

_PACKAGE = "fleetbus_workers.environment.adapters"


class Adapter(NamedTuple):
    """One kind of environment. ``forms`` is how it is written; ``build`` is MODULE:FUNCTION below `adapters`, called with an
    `AdapterContext`; its module needs the packages of ``extra``.

    It is asked only for a spec with something after the colon if ``forms`` has a bare ``:``, and for one without a colon if it
    has none; an adapter ``checks_rest`` when its own message says more. ``task_key``: what has to stand in the config of every
    task where nothing follows the name, and of every task of a package whose name has to follow.
    """

    forms: str
    build: str
    extra: str
    description: str
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


ADAPTERS = (
    Adapter("warehouse", "mcp.factories:build_warehouse", "environment", "tools over a small database; the default"),
    Adapter("scripted[:TURNS]", "scripted:build", "", "nothing outside: a fixed number of turns, for benchmarks"),
    Adapter("mcp:MODULE:FACTORY", "mcp.factories:build_object", "environment", "an MCP server object that your function makes"),
    Adapter(
        "stdio[+reset=TOOL]:COMMAND ARGUMENTS", "mcp.factories:build_command", "environment",
        "an MCP server as a process per episode, or kept and reset with a tool of its own", checks_rest=True,
    ),
    Adapter("http:URL[,URL...]", "mcp.factories:build_http", "environment", "MCP servers over streamable HTTP"),
    Adapter("fleet[:URL]", "fleet.factory:build", "fleet", "instances on the Fleet platform"),
    Adapter("openenv:URL", "openenv.environment:build", "openenv", "an OpenEnv 0.10 server"),
    Adapter("nemo-gym:URL", "nemo_gym.environment:build", "environment", "a resources server of NeMo Gym 0.7", task_key="row"),
    Adapter(
        "ors:URL[#ENVIRONMENT]", "ors.environment:build", "ors",
        "an environment on a server of the Open Reward Standard (`ors-sdk`, `openreward`)", task_key="index",
    ),
    Adapter(
        "remote-gym[:URL[,URL...]]", "remote_gym.environment:build", "remote-gym",
        "servers of the remote-gym protocol (multipart over HTTP)", task_key="base_urls",
    ),
    Adapter("gym[:ID]", "gymnasium.environment:build", "gym", "any registered Gymnasium environment", task_key="id"),
    Adapter("colours[:TURNS]", "colours:build", "vision", "questions about small pictures, for models that see"),
    Adapter(
        "reasoning-gym[:DATASET]", "reasoning_gym:build", "texts", "questions that are made and scored", task_key="dataset",
    ),
    Adapter(
        "textarena[:ID]", "textarena:build", "texts",
        "text games for one player, or several: `players` in the task's config", task_key="id",
    ),
    Adapter(
        "pettingzoo[:FAMILY/NAME]", "pettingzoo:build", "games",
        "games of PettingZoo, AEC or parallel: each agent is a seat", task_key="id",
    ),
    Adapter("openspiel[:GAME]", "openspiel:build", "games", "games of OpenSpiel: each player is a seat", task_key="id"),
    Adapter("coding", "coding.factory:build", "", "Python in a sandbox: bubblewrap (Debian package), or user namespaces"),
    Adapter(
        "harbor:DIR", "harbor.factory:build", "",
        "Harbor tasks: a shell in a container (`fleetbus[docker]`) or in the sandbox",
    ),
    Adapter(
        "agent:SPEC", "agent.factory:build", "agents",
        "an agent that owns its loop: a command, or MODULE:FUNCTION, whose model calls are the turns", checks_rest=True,
    ),
    Adapter(
        "verifiers[+python=PATH]:NAME [ARGUMENT=VALUE ...]", "foreign.factory:build", "agents",
        "an environment of the package `verifiers`, v1 or v0, in an interpreter of its own", checks_rest=True, task_key="index",
    ),
    Adapter(
        "inspect[+python=PATH]:TASK [ARGUMENT=VALUE ...]", "foreign.factory:build", "agents",
        "a task of `inspect_ai` with its solver and scorers, in an interpreter of its own", checks_rest=True, task_key="index",
    ),
    Adapter(
        "bfcl[+python=PATH]:CATEGORY [split=SIDE]", "foreign.factory:build", "agents",
        "multi-turn tasks of `bfcl-eval` with its checker, in an interpreter of its own", checks_rest=True, task_key="id",
    ),
    Adapter(
        "tau2[+python=PATH]:DOMAIN [split=SIDE]", "foreign.factory:build", "agents",
        "tasks of tau2-bench, retail or airline: the seat `agent` with tools, and its `user`", checks_rest=True, task_key="id",
    ),
    Adapter(
        "MODULE:CLASS", "python_class.environment:build", "",
        "a class of your own in this process, also of a file, beside what it imports (`FILE.py:CLASS`)",
    ),
    Adapter("pool:MODULE:CLASS", "python_class.process_pool:build", "", "a class of your own, in several processes"),
    Adapter("process:KIND:COMMAND", "providers.factory:build", "", "a server that is started for each episode", True),
    Adapter("docker:KIND:IMAGE", "providers.factory:build", "docker", "a container that is started for each episode", True),
    Adapter("kubernetes:KIND:IMAGE", "providers.factory:build", "kubernetes", "a Job that is started for each episode", True),
)  # fmt: skip
"""Every kind of environment, in the order in which help and docs show them."""

SPEC_FORMS = ", ".join(adapter.forms for adapter in ADAPTERS)

_WITH_OPTION = ("stdio+", "verifiers+", "inspect+", "bfcl+", "tau2+")

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
    if spec.startswith(f"{PYTHON_OBJECT}:"):
        raise UserError(
            f"the environment of this run is {spec.partition(':')[2]} of a Python program: run that program, or its "
            "fleetbus.train"
        )
    return _build(
        AdapterContext(
            spec=spec,
            grader=verifier,
            observation_bytes=observation_bytes,
            prompt=prompt,
            settings=configuration or Configuration(),
            store_image=store_image,
            build=_build,
        )
    )


def find_adapter(spec: str) -> Adapter:
    """The kind of environment that a spec names. Raises `UserError` for a spec that is not written as its kind is; nothing is
    imported."""
    form, colon, rest = spec.partition(":")
    name = form.partition("+")[0] if form.startswith(_WITH_OPTION) else form
    adapter = _BY_NAME.get(name)
    if adapter is None:
        if installed := find_installed(name):
            return Adapter(f"{name}[:REST]", installed, "", "of another package", checks_rest=True)
        if not name or not rest.strip():
            raise UserError(f"environment {spec!r} is none of: {', '.join((SPEC_FORMS, *list_installed()))}")
        return _BY_NAME["MODULE"]
    if not adapter.accepts(colon, rest):
        raise UserError(f"environment {spec!r} must be written as {adapter.forms}")
    return adapter


def check_task_configs(spec: str, tasks: Iterable[Task]) -> None:
    """Raise `UserError` if one of the tasks that ``spec`` serves does not name what the spec leaves to it."""
    adapter = find_adapter(spec)
    may_name = "[:" in adapter.forms
    if not adapter.task_key or (":" in spec and may_name):
        return
    for task in tasks:
        value = task.config.get(adapter.task_key)
        if not value and value != 0:
            written = f"write {adapter.forms.replace('[:', ':', 1).removesuffix(']')}"
            imported = "give the package's own tasks with --tasks; `fleetbus tasks import` writes them"
            if adapter.name == "nemo-gym":
                imported = "give rows of the server's dataset with --tasks, as docs/plug_in.md says"
            raise UserError(
                f"environment {spec!r}: task {task.key} has no {adapter.task_key} in its config; "
                + (f"add it, or {written}" if may_name else imported)
            )


def _build(context: AdapterContext) -> EnvironmentFactory:
    adapter = find_adapter(context.spec)
    if adapter.name not in _BY_NAME:
        from fleetbus_workers.environment.adapters.python_class.installed import build_installed

        return build_installed(context, adapter.build)
    module, _, function = adapter.build.partition(":")
    try:
        found = importlib.import_module(f"{_PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if not adapter.extra:
            raise
        raise UserError(f"environment {context.spec!r} needs {error.name}: pip install 'fleetbus[{adapter.extra}]'") from error
    build: Build = getattr(found, function)
    return build(context)


def is_own_class(spec: str) -> bool:
    """True if a spec names a class of the user's own, played in the worker's process."""
    form, _, rest = spec.partition(":")
    return bool(rest) and form != PYTHON_OBJECT and find_adapter(spec).name == "MODULE"


def format_markdown_table() -> str:
    """The kinds as docs/environments.md shows them."""
    rows = (
        f"| `{each.forms}` | {each.description} | {f'`fleetbus[{each.extra}]`' if each.extra else ''} |\n" for each in ADAPTERS
    )
    return "| SPEC | what it is | install |\n|---|---|---|\n" + "".join(rows)
