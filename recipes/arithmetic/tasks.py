"""The questions of the recipe calculator, without its tool and its examples."""

import importlib.util
from pathlib import Path


def build_tasks() -> list[dict[str, object]]:
    spec = importlib.util.spec_from_file_location("calculator_tasks", Path(__file__).parents[1] / "calculator" / "tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [
        {name: task[name] for name in ("key", "prompt", "config")} | {"env_key": "arithmetic"} for task in module.build_tasks()
    ]
