"""The verifier that recorded episodes are graded by: a function of a file, or the code that a tasks file has for each task.

It is code of whoever calls, named on the command line; nothing that a recording names is ever run or imported. It runs where
all verifier code runs (`fleetbus_workers.environment.isolation.verifier`): its file is read here, and never imported.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Protocol

import msgspec

from fleetbus.core.text.verifier_parameters import GIVEN
from fleetbus.errors import UserError
from fleetbus.tasks.files import check_verifiers, load_tasks
from fleetbus_schemas import Task


class NewVerifier(Protocol):
    """Verifier code by task."""

    def find_code(self, task: Task | None, key: str) -> str | None:
        """Source that defines ``verify``, for a task as it was recorded, whose name is ``key``; None: there is none for it."""


class FunctionVerifier:
    """One function for all tasks. It is called with those of ``env``, ``final_answer``, ``conversation`` and ``task`` (a dict:
    key, prompt, config, env_variables, ...) that it has parameters for. Raises `UserError` for a file without it."""

    def __init__(self, path: str) -> None:
        file, _, name = path.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise UserError(f"--verifier {path}: give a file and a function in it, as in my_verifier.py:verify")
        try:
            self._source = Path(file).expanduser().read_text(encoding="utf-8")
            found = {node.name: node for node in ast.parse(self._source).body if isinstance(node, _FUNCTIONS)}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--verifier {path}: cannot read {file}: {error}") from error
        except (SyntaxError, ValueError) as error:
            raise UserError(f"--verifier {path}: {file} is no Python: {error}") from error
        if name not in found:
            raise UserError(f"--verifier {path}: {file} defines no function {name}; it defines {', '.join(found) or 'none'}")
        self._name, self._function = name, found[name]
        arguments = self._function.args
        self._parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def find_code(self, task: Task | None, key: str) -> str | None:
        if "task" not in self._parameters:
            return self._source if self._name == "verify" else f"{self._source}\nverify = {self._name}\n"
        facts = json.dumps(msgspec.to_builtins(task or Task(key=key), str_keys=True) | {"key": key})
        given = ", ".join(f"{name}={name}" for name in GIVEN if name in self._parameters)
        is_async = isinstance(self._function, ast.AsyncFunctionDef)
        call = f"{'await ' if is_async else ''}_regraded(task=_task, {given})"
        define = "async def" if is_async else "def"
        return (
            f"{self._source}\n_regraded = {self._name}\n_task = __import__('json').loads({facts!r})\n"
            f"{define} verify(env, final_answer, conversation):\n    return {call}\n"
        )


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class TaskVerifiers:
    """The verifiers of a tasks file, by the keys of tasks. Raises `UserError` for a file that cannot be read or compiled."""

    def __init__(self, file: str) -> None:
        tasks = load_tasks(file)
        if problems := check_verifiers(tasks):
            raise UserError(f"{file}: {problems[0]}")
        self._codes = {task.key: task.verifier for task in tasks}
        if not any(self._codes.values()):
            raise UserError(f"no task of {file} has a verifier: give verifier_code, or --verifier FILE.py:FUNCTION")

    def find_code(self, task: Task | None, key: str) -> str | None:
        return self._codes.get(key)


def open_verifier(path: str) -> NewVerifier:
    """The verifier that ``path`` names: ``FILE.py:FUNCTION`` (``FILE.py``: its function ``verify``), or a tasks file. Raises
    `UserError`."""
    path = f"{path}:verify" if path.endswith(".py") else path
    return TaskVerifiers(path) if not path.rpartition(":")[0].endswith(".py") else FunctionVerifier(path)
