"""Environments of the package verifiers, of its v1 interface (0.4) and of v0 (up to 0.3), played unmodified.

Which of both an environment has, its module says: v0 has a function ``load_environment``. The policy is the endpoint at
``base_url``; the reward is the package's own. An error that it recorded is raised: it would count as 0 otherwise.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

POLICY = "policy"
OTHER = "policy:untrained"
"""The model of roles that are not trained: the policy answers them, too."""

SEAT = "policy:seat:"
"""Before the name of a role in the model of each, where all are trained."""

ALL = "all"

REQUIREMENT = re.compile(r"([\w.-]+)(?:==([\w.]+))?")
DEPENDENCIES = re.compile(r"^# dependencies = \[(.*)\]$", re.MULTILINE)


class EpisodeFailed(Exception):
    """The package recorded an error for an episode."""


def open_environment(name: str, arguments: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    """The environment ``name``, which is a module, with its arguments: of v0 those of its function, of v1 fields of its
    configuration (``solver.harness.id=null``) and ``role``, which is trained: ``all`` of them, each with its own reward."""
    module = importlib.import_module(name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower())
    return open_v0(name, arguments) if hasattr(module, "load_environment") else open_v1(module.__name__, arguments)


@asynccontextmanager
async def open_v0(name: str, arguments: dict[str, Any]) -> AsyncIterator[VersionZero]:
    import verifiers as vf

    yield VersionZero(vf.load_environment(name, **arguments))


class VersionZero:
    """An environment of v0: rows of its training data are its tasks."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._rows = environment.get_dataset()

    def list_tasks(self, count: int) -> list[dict[str, Any]]:
        return [{"index": index, "prompt": show(row["prompt"])} for index, row in zip(range(count), self._rows, strict=False)]

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        row = dict(self._rows[int(task["config"]["index"])])
        client = ClientConfig(api_base_url=base_url, api_key_var="FLEETBUS_NO_KEY", max_retries=0)
        output = await self._environment.run_rollout(row, client, POLICY, {})
        if output.get("error"):
            raise EpisodeFailed(output.get("error_chain") or str(output["error"]))
        return {"reward": output["reward"]}


@asynccontextmanager
async def open_v1(name: str, arguments: dict[str, Any]) -> AsyncIterator[VersionOne]:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    trained = arguments.pop("role", "")
    data: dict[str, Any] = {"taskset": {"id": name}}
    for path, value in arguments.items():
        set_at(data, path.split("."), value)
    fields = type(resolve_env_config(data)).model_fields
    roles = [role for role, field in fields.items() if isinstance(field.default, vf.AgentConfig)]
    trained = trained or roles[0]
    if trained not in (*roles, ALL):
        raise ValueError(f"no role {trained!r}; there are {', '.join(roles)}")
    for role in roles:
        settings = data.setdefault(role, {})
        settings.setdefault("runtime", {}).setdefault("type", "subprocess")  # the package's own default is a paid service
        if role != trained:
            settings.setdefault("model", f"{SEAT}{role}" if trained == ALL else OTHER)
    run_scripts_here()
    environment = load_environment(resolve_env_config(data))
    async with environment.serving():
        yield VersionOne(environment, roles if trained == ALL else [trained])


class VersionOne:
    """An environment of v1. The reward of an episode is that of the first of its ``trained`` roles that was played, the mean if
    it played several times; where several are trained, each has its own."""

    def __init__(self, environment: Any, trained: list[str]) -> None:
        self._environment = environment
        self._trained = trained
        self._tasks: list[Any] = []
        self._left = iter(environment.taskset)

    def _get_task(self, index: int) -> Any:
        self._tasks += itertools.islice(self._left, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]

    def list_tasks(self, count: int) -> list[dict[str, Any]]:
        tasks = list(itertools.islice(iter(self._environment.taskset), count))
        return [{"index": index, "prompt": show(task.data.prompt)} for index, task in enumerate(tasks)]

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var="FLEETBUS_NO_KEY")
        context = vf.ModelContext(model=POLICY, client=client)
        slot = self._environment.slots(self._get_task(int(task["config"]["index"])))[0]
        episode = await self._environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise EpisodeFailed("; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode is not ok")
        rewards: dict[str, list[float]] = {}
        for trace in episode.traces:
            rewards.setdefault(trace.agent.name or self._trained[0], []).append(trace.reward)
        means = {role: sum(rewards[role]) / len(rewards[role]) for role in self._trained if role in rewards}
        if not means:
            raise EpisodeFailed(f"the role {self._trained[0]!r} was not played")
        reward = next(iter(means.values()))
        return {"reward": reward, "seats": means} if len(self._trained) > 1 else {"reward": reward}


def show(prompt: Any) -> str:
    """The text of a prompt, for people; the policy is shown what the package sends."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    contents = [each["content"] if isinstance(each, dict) else each.content for each in prompt]
    return "\n".join(content for content in contents if isinstance(content, str))


def set_at(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        data = data.setdefault(name, {})
    data[path[-1]] = value


def run_scripts_here() -> None:
    """Have the scripts of harnesses run in this interpreter where it has all that they ask for: the package would let uv
    fetch that into another one, which needs a network."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    prepare = SubprocessRuntime.prepare_uv_script

    async def prepare_here(self: Any, script: str | bytes, env: Any = None, *, activate: bool = True) -> list[str]:
        text = script if isinstance(script, str) else script.decode()
        if not has_all(text):
            return await prepare(self, script, env, activate=activate)  # type: ignore[no-any-return]
        return [sys.executable, write_script(text)]

    SubprocessRuntime.prepare_uv_script = prepare_here


def write_script(text: str) -> str:
    """The path of a file with this text in the working folder."""
    path = Path(f"{hashlib.sha256(text.encode()).hexdigest()}.py").absolute()
    if not path.exists():
        path.write_text(text)
    return str(path)


def has_all(script: str) -> bool:
    """True if this interpreter has the packages that a script names at its beginning."""
    listed = DEPENDENCIES.search(script)
    wanted = [REQUIREMENT.fullmatch(each.strip(" \"'")) for each in listed[1].split(",")] if listed else [None]
    try:
        return all(each is not None and each[2] in (None, version(each[1])) for each in wanted)
    except PackageNotFoundError:
        return False
