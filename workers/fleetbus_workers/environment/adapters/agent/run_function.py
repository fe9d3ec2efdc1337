"""Runs an agent that is a Python function, with the task as its only argument: ``python -P -m ... MODULE:FUNCTION FOLDER``.

Modules are looked up in FOLDER after everything that is installed. What the function returns is its reward. Programs that the
function starts, as a shell for the policy, find neither the task nor the address that takes the reward: the file is removed
before the function is called, and this process cannot be looked into.
"""

import ctypes
import importlib
import inspect
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
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
    returned = call(getattr(importlib.import_module(module), name), task)
    if reward_url and returned is not None:
        post(reward_url, returned if isinstance(returned, dict) else {"reward": returned})


def take_task(file: Path) -> dict[str, Any]:
    """The task, which no other process can read from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    task: dict[str, Any] = json.loads(file.read_bytes())
    file.unlink()
    return task


def call(function: Callable[..., Any], task: dict[str, Any]) -> Any:
    """The result of the function, awaited if it is asynchronous."""

    async def run_async() -> object:
        return await function(task)

    return anyio.run(run_async) if inspect.iscoroutinefunction(function) else function(task)


def post(url: str, body: object) -> None:
    """Post the reward to the endpoint. Raises `OSError` if it is refused, as what is no number is."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=POST_SECONDS).close()


if __name__ == "__main__":
    main()
