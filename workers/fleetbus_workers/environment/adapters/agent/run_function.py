"""Runs an agent that is a Python function, with the task as its only argument: ``python -P -m ... MODULE:FUNCTION FOLDER``.

Modules are looked up in FOLDER after everything that is installed.
"""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path

import anyio


def main() -> None:
    """Import the function, call it with the task's JSON object, await it if it is asynchronous."""
    module, _, name = sys.argv[1].partition(":")
    sys.path.append(sys.argv[2])
    function = getattr(importlib.import_module(module), name)
    task = json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_bytes())

    async def run_async() -> object:
        return await function(task)

    if inspect.iscoroutinefunction(function):
        anyio.run(run_async)
    else:
        function(task)


if __name__ == "__main__":
    main()
