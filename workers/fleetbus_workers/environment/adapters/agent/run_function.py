"""Runs an agent that is a Python function, with the task as its only argument: ``python -P -m ... MODULE:FUNCTION FOLDER``.

Modules are looked up in FOLDER after everything that is installed. What the function returns is its reward. Programs that the
function starts, as a shell for the policy, find neither the task nor the address that takes the reward: the file is removed
before the function is called, and this process cannot be looked into.
"""

import ctypes
import importlib
import inspect
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio

SET_DUMPABLE = 4
POST_SECONDS = 60.0


def main() -> None:
    """Import the function, call it with the task's JSON object, await it if it is asynchronous, post what it returns."""
    module, _, name = sys.argv[1].partition(":")
    sys.path.append(sys.argv[2])
    task = take_task(Path(os.environ.pop("FLEETBUS_TASK_FILE")))
    reward_url = task.pop("reward_url", "")
    function = getattr(import_agent(module), name)
    with explain_missing_modules(module):
        returned = call(function, task)
    if reward_url and returned is not None:
        post(reward_url, build_body(returned))


def take_task(file: Path) -> dict[str, Any]:
    """The task, which no other process can read from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    task: dict[str, Any] = json.loads(file.read_bytes())
    file.unlink()
    return task


def import_agent(module: str) -> ModuleType:
    """The module of the function. Raises `ModuleNotFoundError` for one that it imports and that is not here, with a remedy."""
    with explain_missing_modules(module):
        return importlib.import_module(module)


@contextmanager
def explain_missing_modules(module: str) -> Iterator[None]:
    """A `ModuleNotFoundError` raised within gets the remedy, also one of an import in a function of ``module``."""
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = f"if it lies beside {module}, list it in environment.agent_files, which says what a sandboxed agent reads"
        raise ModuleNotFoundError(f"{error}: {remedy}") from error


def call(function: Callable[..., Any], task: dict[str, Any]) -> Any:
    """The result of the function, awaited if it is asynchronous."""

    async def run_async() -> object:
        return await function(task)

    return anyio.run(run_async) if inspect.iscoroutinefunction(function) else function(task)


def build_body(returned: object) -> dict[str, object]:
    """The body that is posted for a result of the function. Raises `TypeError` for one that holds no reward, which it shows."""
    given: dict[Any, Any] = returned if isinstance(returned, dict) else {"reward": returned}
    seats = given.get("seats", {})
    try:
        if unknown := given.keys() - {"reward", "reason", "seats"}:
            raise TypeError(f"{min(unknown, key=str)!r} is none of reward, reason, seats")
        if "reward" not in given:
            raise TypeError("it lacks 'reward'")
        rewards = {str(name): to_number(reward) for name, reward in seats.items()}
        return {"reward": to_number(given["reward"]), "reason": str(given.get("reason") or ""), "seats": rewards}
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"the agent's function returned {returned!r:.200}, which is no reward: {error}") from None


def to_number(reward: Any) -> float | None:
    """A number as JSON has it, of any type that is one, such as numpy's. Raises as `float` does, and `TypeError` for texts."""
    if isinstance(reward, str | bytes | bytearray):
        raise TypeError("it must be a number or None, not text")
    number = None if reward is None else float(reward)
    if number is not None and not math.isfinite(number):
        raise ValueError("it must be a finite number or None")
    return number


def post(url: str, body: object) -> None:
    """Post the reward to the endpoint. Raises `OSError` if it is refused, with the endpoint's words."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=POST_SECONDS).close()
    except urllib.error.HTTPError as error:
        raise OSError(f"the reward was refused: {error}: {error.read(500).decode(errors='replace')}") from None


if __name__ == "__main__":
    main()
