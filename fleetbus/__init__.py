"""Reinforcement learning of LLM agents on remote environments, over one durable NATS log.

Everything that a program of yours imports is here, and nothing is loaded before it is used. Environments: `Environment`, and
what its calls take and give. Training: `train`, `Run`. Looking at runs: `open_run`. Trainers of your own: `client`. Other
modules are internal and may change at any time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from fleetbus import client as client
    from fleetbus.errors import BusError as BusError
    from fleetbus.errors import FleetbusError as FleetbusError
    from fleetbus.errors import NotPermitted as NotPermitted
    from fleetbus.errors import RunFailed as RunFailed
    from fleetbus.errors import TakenOver as TakenOver
    from fleetbus.errors import UserError as UserError
    from fleetbus.recording.episodes import EpisodeRow as EpisodeRow
    from fleetbus.recording.episodes import Transcript as Transcript
    from fleetbus.recording.rows import StepRow as StepRow
    from fleetbus.recording.rows import TokenRow as TokenRow
    from fleetbus.tasks import load_tasks as load_tasks
    from fleetbus_schemas import Action as Action
    from fleetbus_schemas import ChatMessage as ChatMessage
    from fleetbus_schemas import Image as Image
    from fleetbus_schemas import Task as Task
    from fleetbus_schemas import Text as Text
    from fleetbus_schemas import ToolCall as ToolCall
    from fleetbus_schemas import ToolSpec as ToolSpec
    from fleetbus_workers.api.evaluation import Evaluation as Evaluation
    from fleetbus_workers.api.events import Event as Event
    from fleetbus_workers.api.reader import RunReader as RunReader
    from fleetbus_workers.api.reader import open_run as open_run
    from fleetbus_workers.api.run import Run as Run
    from fleetbus_workers.api.run import print_event as print_event
    from fleetbus_workers.api.run import train as train
    from fleetbus_workers.environment.base import Environment as Environment
    from fleetbus_workers.environment.base import EnvironmentFailed as EnvironmentFailed
    from fleetbus_workers.environment.base import Start as Start
    from fleetbus_workers.environment.base import Step as Step
    from fleetbus_workers.environment.base import Verdict as Verdict
    from fleetbus_workers.up.summary_builder import Summary as Summary

    __version__: str

Stability = Literal["stable", "provisional"]


class _PublicName(NamedTuple):
    module: str
    stability: Stability


_PUBLIC = {
    "Environment": _PublicName("fleetbus_workers.environment.base", "stable"),
    "Start": _PublicName("fleetbus_workers.environment.base", "stable"),
    "Step": _PublicName("fleetbus_workers.environment.base", "stable"),
    "Verdict": _PublicName("fleetbus_workers.environment.base", "stable"),
    "EnvironmentFailed": _PublicName("fleetbus_workers.environment.base", "stable"),
    "Task": _PublicName("fleetbus_schemas", "stable"),
    "Action": _PublicName("fleetbus_schemas", "stable"),
    "ChatMessage": _PublicName("fleetbus_schemas", "stable"),
    "Text": _PublicName("fleetbus_schemas", "stable"),
    "Image": _PublicName("fleetbus_schemas", "stable"),
    "ToolCall": _PublicName("fleetbus_schemas", "stable"),
    "ToolSpec": _PublicName("fleetbus_schemas", "stable"),
    "load_tasks": _PublicName("fleetbus.tasks", "stable"),
    "train": _PublicName("fleetbus_workers.api.run", "provisional"),
    "print_event": _PublicName("fleetbus_workers.api.run", "provisional"),
    "Run": _PublicName("fleetbus_workers.api.run", "provisional"),
    "Event": _PublicName("fleetbus_workers.api.events", "provisional"),
    "Summary": _PublicName("fleetbus_workers.up.summary_builder", "provisional"),
    "Evaluation": _PublicName("fleetbus_workers.api.evaluation", "provisional"),
    "open_run": _PublicName("fleetbus_workers.api.reader", "provisional"),
    "RunReader": _PublicName("fleetbus_workers.api.reader", "provisional"),
    "EpisodeRow": _PublicName("fleetbus.recording.episodes", "provisional"),
    "Transcript": _PublicName("fleetbus.recording.episodes", "provisional"),
    "TokenRow": _PublicName("fleetbus.recording.rows", "provisional"),
    "StepRow": _PublicName("fleetbus.recording.rows", "provisional"),
    "client": _PublicName("fleetbus.client", "provisional"),
    "FleetbusError": _PublicName("fleetbus.errors", "stable"),
    "UserError": _PublicName("fleetbus.errors", "stable"),
    "NotPermitted": _PublicName("fleetbus.errors", "stable"),
    "RunFailed": _PublicName("fleetbus.errors", "provisional"),
    "TakenOver": _PublicName("fleetbus.errors", "stable"),
    "BusError": _PublicName("fleetbus.errors", "stable"),
    "__version__": _PublicName("", "stable"),
}
"""The public names: where each is, and its stability. ``stable``: names, arguments and fields stay until 1.0, and more may be
added; ``provisional``: it may change in any release, with a line in CHANGELOG.md."""

__all__ = [
    "Action",
    "BusError",
    "ChatMessage",
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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fleetbus' has no attribute {name!r}")
    module = _PUBLIC[name].module
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("fleetbus")
    elif module == f"fleetbus.{name}":
        value = importlib.import_module(module)
    else:
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
