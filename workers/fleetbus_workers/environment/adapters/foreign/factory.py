"""``verifiers:NAME``, ``inspect:TASK``, ``bfcl:CATEGORY``, ``tau2:DOMAIN``: environments of other packages, each in an
interpreter with it.

``[+python=PATH]`` before the colon names the interpreter, else `environment.python` does: two versions of a package play in one
run. After the name come arguments of the environment, as in ``verifiers:kuhn-poker role=player1``. A name that is a path
(``./my_env``, ``./evals.py@task``) is imported from there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.agent.environment import AgentEnvironment
from fleetbus_workers.environment.adapters.agent.factory import list_secret_files, split_names
from fleetbus_workers.environment.adapters.foreign.host import LIMITS, ForeignHost

RUNNER = Path(__file__).parent / "inside" / "fleetbus_runner.py"
PYTHON = "+python="

MODULES = {"bfcl": "bfcl_eval", "tau2": "tau2_{name}_mcp"}
"""By kind, what its interpreter has to have for a name; the others import what lies beside an environment, too."""

FOUND, MISSING = 3, 4
LOOK = f"import importlib.util, sys; sys.exit({MISSING} if importlib.util.find_spec(sys.argv[1]) is None else {FOUND})"
LOOK_SECONDS, LOOK_BYTES = 60.0, 4096

NAMES = {"tau2": ("airline", "retail")}
"""Of kinds that have no others."""

REPLAYABLE = ("tau2",)
"""Kinds that ask the same again where they are answered the same: a takeover goes on where the episode was."""


def build(context: AdapterContext) -> Factory:
    """Environments of another package. Raises `UserError` for an interpreter or a name that is not there."""
    wanted = context.settings.environment
    if wanted.compaction != "off" or context.settings.inference.reasoning == "template":
        raise UserError(
            f"environment {context.spec!r}: another package decides about its context itself: leave out environment.compaction "
            "and inference.reasoning = template"
        )
    command = build_command(context.spec, wanted.python)
    places = {find_place(word) for word in command[2:] if os.path.isabs(word)}
    host = ForeignHost(
        command,
        policy="required" if wanted.sandbox == "required" and wanted.agent_isolation == "auto" else wanted.agent_isolation,
        passed=split_names(wanted.pass_variables),
        files=split_names(wanted.agent_files) | {str(RUNNER.parent)} | places,
        secret_files=list_secret_files(context.settings),
        limits=LIMITS,
    )
    make = partial(
        AgentEnvironment,
        host,
        grader=context.grader,
        exit_seconds=context.settings.limits.verify / 2,
        grades="returns",
        paces_itself=True,
        settings=msgspec.structs.replace(wanted, agent_crash_reward=""),  # an error of the package's is nobody's reward
        replayable=find_kind(context.spec) in REPLAYABLE,
    )
    return Factory(make, host.run)


def build_command(spec: str, python: str, *options: str) -> list[str]:
    """The command line of the runner for a spec, in the interpreter that it names, or ``python``. Raises `UserError`."""
    form, _, rest = spec.partition(":")
    _, named, path = form.partition(PYTHON)
    kind = find_kind(spec)
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: what follows the colon cannot be read: {error}") from error
    if words and words[0] not in NAMES.get(kind, words):
        raise UserError(f"environment {spec!r}: {kind} has no {words[0]!r}; there are {' and '.join(NAMES[kind])}")
    chosen = path if named else python
    found = shutil.which(os.path.expanduser(chosen)) if chosen else None
    if found is None:
        problem = f"{chosen!r} is no program" if chosen else "no interpreter is named"
        raise UserError(
            f"environment {spec!r}: {problem}; give the Python that has the package with --environment-python PATH, or "
            f"{kind}{PYTHON}PATH:{rest or 'NAME'}"
        )
    if not words or any("=" not in word for word in words[1:]):
        raise UserError(f"environment {spec!r} must be written as {kind}:NAME [ARGUMENT=VALUE ...]")
    if kind == "verifiers" and find_place(words[0]).endswith(".py"):
        module = os.path.basename(find_place(words[0])).removesuffix(".py") or "NAME"
        raise UserError(
            f"environment {spec!r}: verifiers imports environments by name, not from a file: name the folder that {module}.py "
            f"lies in, verifiers:./FOLDER with the module in FOLDER/FOLDER.py, or install it and write verifiers:{module}"
        )
    is_path = words[0].startswith((".", "/", "~")) or find_place(words[0]).endswith(".py")
    name = os.path.abspath(os.path.expanduser(words[0])) if is_path else words[0]
    if os.path.isabs(name) and not os.path.exists(find_place(name)):
        raise UserError(f"environment {spec!r}: there is no {find_place(name)}")
    return [os.path.abspath(found), str(RUNNER), *options, kind, name, *words[1:]]


def check_package(spec: str, python: str) -> None:
    """Raise `UserError` if the interpreter of a spec, or ``python``, lacks what it imports; nothing of it is imported here.
    Blocks, at most for `LOOK_SECONDS`."""
    form = MODULES.get(find_kind(spec))
    if form is None:
        return
    program, _, _, name, *_ = build_command(spec, python)
    module = form.format(name=name)
    asked = [program, "-c", LOOK, module]
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as said:  # a working folder is imported from
        try:
            code = subprocess.run(
                asked, cwd=empty, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, timeout=LOOK_SECONDS
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"environment {spec!r}: {program} does not run: {error}") from error
        said.seek(max(said.seek(0, os.SEEK_END) - LOOK_BYTES, 0))
        lines = said.read().decode(errors="replace").strip().splitlines()
    if code == MISSING:
        raise UserError(f"environment {spec!r}: {program} has no module {module}; docs/plug_in.md says what to install there")
    if code != FOUND:
        raise UserError(f"environment {spec!r}: {program} does not run Python: {lines[-1] if lines else code}")


def find_kind(spec: str) -> str:
    return spec.partition(":")[0].partition(PYTHON)[0]


def find_place(name: str) -> str:
    """The folder or file of a name that is a path, which may end with ``@TASK``."""
    return name.rpartition("@")[0] or name
