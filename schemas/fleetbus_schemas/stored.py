"""The messages that the log holds, by the kind of subject that they are stored on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fleetbus_schemas.action import Action
from fleetbus_schemas.episode import AttemptReleased, AttemptStarted, EpisodeFinished, EpisodeRequested
from fleetbus_schemas.lifecycle import WorkerDraining, WorkerFailed, WorkerStarted, WorkerStopped
from fleetbus_schemas.message import Message
from fleetbus_schemas.observation import Observation
from fleetbus_schemas.policy import PolicyPublished
from fleetbus_schemas.retention import FloorRaised
from fleetbus_schemas.session import SessionClaimed, SessionEnded, SessionRecorded
from fleetbus_schemas.training import CheckpointStored, EvaluationFinished, LineageStarted, StepTrained, TrainingFinished

STORED: Mapping[str, tuple[type[Message], ...]] = MappingProxyType(
    {
        "task": (EpisodeRequested,),
        "obs": (Observation,),
        "act": (Action,),
        "episode": (AttemptStarted, AttemptReleased, EpisodeFinished),
        "policy": (PolicyPublished, LineageStarted),
        "train": (LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished),
        "life": (WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed),
        "floor": (FloorRaised,),
        "session": (SessionClaimed, SessionRecorded, SessionEnded),
    }
)
"""Keys are the third tokens of captured subjects (`fleetbus_schemas.subjects.Subjects`)."""
