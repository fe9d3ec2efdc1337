"""``agent:SPEC``: a command, or a Python function ``MODULE:FUNCTION`` that gets the task and runs in a process of its own."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fleetbus.bus.nats.server_context import list_context_files
from fleetbus.config.load import DEFAULT_FILE
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.python_process import build_module_command
from fleetbus.tasks.datasets import is_remote, split_version
from fleetbus.tasks.harbor import PREFIX as HARBOR
from fleetbus.user_code import load_callable
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.agent.environment import AgentEnvironment, OwnReward
from fleetbus_workers.environment.adapters.agent.host import AgentHost
from fleetbus_workers.environment.adapters.agent.visible import list_module
from fleetbus_workers.environment.isolation.sandbox import SandboxLimits

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
RUNNER = "fleetbus_workers.environment.adapters.agent.run_function"


def build(context: AdapterContext) -> Factory:
    """Environments around the agent of ``agent:SPEC``. Raises `UserError` for a command or function that is not there."""
    command = build_command(context.spec, context.rest)
    settings = context.settings
    if settings.environment.compaction != "off" or settings.inference.reasoning == "template":
        raise UserError(
            f"environment {context.spec!r}: an agent decides about its context itself: leave out environment.compaction and "
            "inference.reasoning = template"
        )
    wanted = settings.environment
    policy = "required" if wanted.sandbox == "required" and wanted.agent_isolation == "auto" else wanted.agent_isolation
    files = split_names(wanted.agent_files)
    is_function = FUNCTION.fullmatch(context.rest) is not None
    if is_function and (module := list_module(context.rest.partition(":")[0])):
        files.add(str(module))
    host = AgentHost(
        command,
        policy=policy,
        passed=split_names(wanted.pass_variables),
        files=files,
        secret_files=list_secret_files(settings),
        code_limits=SandboxLimits(seconds=context.call_seconds),
    )
    grades: OwnReward = "returns" if is_function else "never"
    if wanted.agent_reward_url:
        grades = "posts"
    exit_seconds = settings.limits.verify / 2
    make = partial(AgentEnvironment, host, grader=context.grader, exit_seconds=exit_seconds, grades=grades, settings=wanted)
    return Factory(make, host.run)


def list_secret_files(settings: Configuration) -> list[Path]:
    """List what an agent never sees, unless it is listed: the run's files, its tasks, keys and configuration."""
    tasks = settings.run.tasks.removeprefix(HARBOR)
    places = [DEFAULT_FILE, tasks, split_version(tasks)[0], settings.nats.auth]
    context = list_context_files(settings.nats.url)
    return [
        run_folder(settings.run).path,
        *context,
        *(Path(place).expanduser() for place in places if place and not is_remote(place)),
    ]


def split_names(text: str) -> set[str]:
    return {name for name in map(str.strip, text.split(",")) if name}


def build_command(spec: str, rest: str) -> Sequence[str]:
    """The command line of an agent, whose working folder is another: files are named by their whole paths."""
    if FUNCTION.fullmatch(rest):
        load_callable(f"environment {spec!r}", rest)
        return build_module_command(RUNNER, rest, os.getcwd())
    try:
        command = shlex.split(rest)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    if not command:
        raise UserError(f"environment {spec!r} names no agent, as in agent:my_agents:play or agent:python my_agent.py")
    found = shutil.which(command[0])
    if found is None:
        raise UserError(f"environment {spec!r}: command {command[0]!r} not found; install it or give its path")
    return [found, *[os.path.abspath(word) if os.path.isfile(word) else word for word in command[1:]]]
