"""The default tasks, in memory or as a Fleet tasks file: train and held-out seeds never meet."""

import json

import msgspec

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.warehouse.items import draw_warehouse, question
from fleetbus_workers.environment.isolation.verifier.own import WAREHOUSE

ENVIRONMENT = "warehouse"

HELD_OUT_BASE = 1 << 30
"""Seeds from here on are held out; training seeds stay below."""


def build_warehouse_task(seed: int) -> Task:
    """The task of a seed: the question, and a verifier that reads the answer from the episode's own database."""
    warehouse = draw_warehouse(seed)
    return Task(
        key=f"warehouse-{seed}",
        env=ENVIRONMENT,
        prompt=question(warehouse),
        seed=seed,
        verifier=WAREHOUSE.format(field=warehouse.field, name=warehouse.name),
    )


def build_train_tasks(count: int, *, seed: int) -> list[Task]:
    """``count`` training tasks; different seeds give different warehouses."""
    base = (seed * 1_000_003) % (HELD_OUT_BASE - count)
    return [build_warehouse_task(base + index) for index in range(count)]


def build_held_out_tasks(count: int) -> list[Task]:
    """The first ``count`` held-out tasks, the same for every seed."""
    return [build_warehouse_task(HELD_OUT_BASE + index) for index in range(count)]


def build_solved_tasks(count: int) -> list[Task]:
    """Held-out tasks with the actions that solve them in their config as ``oracle``."""
    return [msgspec.structs.replace(task, config={"oracle": _solve(task)}) for task in build_held_out_tasks(count)]


def _solve(task: Task) -> list[str]:
    assert task.seed is not None
    warehouse = draw_warehouse(task.seed)
    id = next(item.id for item in warehouse.items if item.name == warehouse.name)
    calls = [
        {"name": "find_item", "arguments": {"name": warehouse.name}},
        {"name": "get_field", "arguments": {"id": id, "field": warehouse.field}},
    ]
    return [*(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), f"{warehouse.answer} <done>"]
