"""Reinforcement learning of LLM agents on remote environments, over one durable NATS log.

Everything that a program of yours imports is here, and nothing is loaded before it is used; type checkers read a stub.
Environments: `Environment`, and what its calls take and give. Training: `train`, `Run`. Looking at runs: `open_run`. Trainers
of your own: `client`. Other modules are internal and may change at any time.
"""

from __future__ import annotations

_PUBLIC = {
    "Environment": ("fleetbus_workers.environment.base", "stable"),
    "Start": ("fleetbus_workers.environment.base", "stable"),
    "Step": ("fleetbus_workers.environment.base", "stable"),
    "Ahead": ("fleetbus_workers.environment.base", "provisional"),
    "ContextChange": ("fleetbus_schemas", "provisional"),
    "Verdict": ("fleetbus_workers.environment.base", "stable"),
    "EnvironmentFailed": ("fleetbus_workers.environment.base", "stable"),
    "Task": ("fleetbus_schemas", "stable"),
    "Action": ("fleetbus_schemas", "stable"),
    "ChatMessage": ("fleetbus_schemas", "stable"),
    "Text": ("fleetbus_schemas", "stable"),
    "Image": ("fleetbus_schemas", "stable"),
    "ToolCall": ("fleetbus_schemas", "stable"),
    "ToolSpec": ("fleetbus_schemas", "stable"),
    "load_tasks": ("fleetbus.tasks.files", "stable"),
    "train": ("fleetbus_workers.api.run", "provisional"),
    "print_event": ("fleetbus_workers.api.run", "provisional"),
    "Run": ("fleetbus_workers.api.run", "provisional"),
    "Event": ("fleetbus_workers.api.events", "provisional"),
    "Summary": ("fleetbus_workers.up.summary_builder", "provisional"),
    "Evaluation": ("fleetbus_workers.api.evaluation", "provisional"),
    "open_run": ("fleetbus_workers.api.reader", "provisional"),
    "RunReader": ("fleetbus_workers.api.reader", "provisional"),
    "EpisodeRow": ("fleetbus.recording.episodes", "provisional"),
    "Transcript": ("fleetbus.recording.episodes", "provisional"),
    "TokenRow": ("fleetbus.recording.rows", "provisional"),
    "StepRow": ("fleetbus.recording.rows", "provisional"),
    "client": ("fleetbus.client", "provisional"),
    "FleetbusError": ("fleetbus.errors", "stable"),
    "UserError": ("fleetbus.errors", "stable"),
    "NotPermitted": ("fleetbus.errors", "stable"),
    "RunFailed": ("fleetbus.errors", "provisional"),
    "TakenOver": ("fleetbus.errors", "stable"),
    "BusError": ("fleetbus.errors", "stable"),
    "__version__": ("", "stable"),
}
"""The public names: where each is, and its stability. ``stable``: names, arguments and fields stay until 1.0, and more may be
added; ``provisional``: it may change in any release, with a line in CHANGELOG.md."""

__all__ = [
    "Action",
    "Ahead",
    "BusError",
    "ChatMessage",
    "ContextChange",
    "Environment",
    "EnvironmentFailed",
    "EpisodeRow",
    "Evaluation",
    "Event",
    "FleetbusError",
    "Image",
    "NotPermitted",
    "Run",
    "RunFailed",
    "RunReader",
    "Start",
    "Step",
    "StepRow",
    "Summary",
    "TakenOver",
    "Task",
    "Text",
    "TokenRow",
    "ToolCall",
    "ToolSpec",
    "Transcript",
    "UserError",
    "Verdict",
    "__version__",
    "client",
    "load_tasks",
    "open_run",
    "print_event",
    "train",
]


def __getattr__(name: str) -> object:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module 'fleetbus' has no attribute {name!r}")
    module, _ = _PUBLIC[name]
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("fleetbus")
    elif module == f"fleetbus.{name}":
        value = importlib.import_module(module)
    else:
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
