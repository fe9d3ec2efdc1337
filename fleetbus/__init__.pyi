"""The public names for type checkers: `__init__.py` loads each when it is asked for. A test holds the two together."""

from typing import Literal

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
from fleetbus.tasks.files import load_tasks as load_tasks
from fleetbus_schemas import Action as Action
from fleetbus_schemas import ChatMessage as ChatMessage
from fleetbus_schemas import ContextChange as ContextChange
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
from fleetbus_workers.environment.base import Ahead as Ahead
from fleetbus_workers.environment.base import Environment as Environment
from fleetbus_workers.environment.base import EnvironmentFailed as EnvironmentFailed
from fleetbus_workers.environment.base import Start as Start
from fleetbus_workers.environment.base import Step as Step
from fleetbus_workers.environment.base import Verdict as Verdict
from fleetbus_workers.up.summary_builder import Summary as Summary

__version__: str

_Stability = Literal["stable", "provisional"]

_PUBLIC: dict[str, tuple[str, _Stability]]

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
