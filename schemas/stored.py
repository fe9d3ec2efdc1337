"""Which messages the log holds, by the kind of subject that they are stored on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from schemas.action import Action
from schemas.episode import AttemptReleased, AttemptStarted, EpisodeFinished, EpisodeRequested
from schemas.lifecycle import WorkerDraining, WorkerFailed, WorkerStarted, WorkerStopped
from schemas.message import Message
from schemas.observation import Observation
from schemas.policy import PolicyPublished
from schemas.session import SessionClaimed, SessionEnded, SessionRecorded
from schemas.training import CheckpointStored, EvaluationFinished, LineageStarted, StepTrained, TrainingFinished

STORED: Mapping[str, tuple[type[Message], ...]] = MappingProxyType(
    {
        "task": (EpisodeRequested,),
        "obs": (Observation,),
        "act": (Action,),
        "episode": (AttemptStarted, AttemptReleased, EpisodeFinished),
        "policy": (PolicyPublished, LineageStarted),
        "train": (LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished),
        "life": (WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed),
        "session": (SessionClaimed, SessionRecorded, SessionEnded),
    }
)
"""Keys are the third tokens of captured subjects (`schemas.subjects.Subjects`)."""
