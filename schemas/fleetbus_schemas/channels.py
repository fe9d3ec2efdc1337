"""The table of channels: who sends which message on which subject, where it is kept, and which role uses it in which way.

Subjects (`fleetbus_schemas.subjects`), the AsyncAPI document, the streams of a run (`fleetbus.bus.streams`) and the rights of
every role (`fleetbus.auth.permissions`) are derived from it. A new channel or a new right is a change of this table and of the
code that uses it, and of nothing else (docs/decisions/0161-one-table-of-channels.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from fleetbus_schemas.action import Action
from fleetbus_schemas.episode import AttemptReleased, AttemptStarted, EpisodeFinished, EpisodeRequested
from fleetbus_schemas.label import EpisodeLabeled
from fleetbus_schemas.lifecycle import (
    ControlAnswered,
    ControlRequested,
    Heartbeat,
    LaneLease,
    WorkerDraining,
    WorkerFailed,
    WorkerRole,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_schemas.message import Message
from fleetbus_schemas.observation import Observation
from fleetbus_schemas.operation import OperationRecorded
from fleetbus_schemas.policy import PolicyPublished, WeightsOffered
from fleetbus_schemas.retention import FloorRaised
from fleetbus_schemas.session import SessionAnswer, SessionCall, SessionClaimed, SessionEnded, SessionRecorded
from fleetbus_schemas.training import CheckpointStored, EvaluationFinished, LineageStarted, StepTrained, TrainingFinished

WORKERS: tuple[WorkerRole, ...] = ("environment", "inference", "learner", "recorder", "gateway")
"""Roles that say of themselves that they live, and take control requests."""

ROLES: tuple[str, ...] = ("admin", "operator", *WORKERS, "monitor")
"""All users of a run. The admin declares it and may do everything; the operator requests, cancels, drains and pauses; the
monitor only reads."""

Kept = Literal["log", "lanes", "bucket", "images", ""]
"""The stream that stores the messages of a channel: the log, the lane leases, the bucket of the weights, that of images, or
none."""

Way = Literal["send", "last", "batch", "scan", "work", "progress", "serve", "call", "hear", "fetch", "floors", "purge", "info"]
"""How a role uses a channel.

| way | calls of the bus |
|---|---|
| ``send`` | `publish`; `broadcast` where nothing is kept; `put` of objects |
| ``last`` | `last`, by a direct get that names its subject |
| ``batch`` | `history`, `last_of_each`, `next_entry`: the server does not see which subjects they read, so they may read all |
| ``scan`` | `read`, `scan`, by a consumer with this filter; `history` of a role that may not ``batch`` |
| ``work``, ``progress`` | `pull` and `ack_floors` of the durable consumers; `ack_floors` of those alone that everybody shares |
| ``serve``, ``call``, ``hear`` | `serve`; `request`; `listen` |
| ``fetch`` | `get` of objects |
| ``floors``, ``purge`` | `ack_floors` of all durable consumers; `purge` of the whole log, or `remove` of objects |
| ``info`` | `log_state`, `list_subjects`, and the server's clock |
"""

_PARAMETER = re.compile(r"\{(\w+)\}")


class Use(msgspec.Struct, frozen=True):
    """``role`` uses a channel in these ``ways``. ``of``: the roles that it calls or hears; all else is its own.
    ``command``: the only one that it gives, where the address has one."""

    role: str
    ways: tuple[Way, ...]
    of: tuple[str, ...] = ()
    command: str = "*"


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One subject, its parameters in braces. ``answers`` are sent to the reply subject; ``consumer`` is the name of the durable
    consumers that share its messages out. Without ``messages`` it is no part of the contract with other programs."""

    name: str
    address: str
    about: str
    uses: tuple[Use, ...]
    messages: tuple[type[Message], ...] = ()
    answers: tuple[type[Message], ...] = ()
    kept: Kept = ""
    consumer: str = ""

    def fill(self, **parameters: str) -> str:
        """The address with these parameters, and ``*`` for the others."""
        return _PARAMETER.sub(lambda found: parameters.get(found[1], "*"), self.address)

    def below(self, **parameters: str) -> str:
        """As `fill`, ending in ``>`` in place of the first parameter that is not given and all after it."""
        for found in _PARAMETER.finditer(self.address):
            if found[1] not in parameters:
                return self.address[: found.start()].format(**parameters) + ">"
        return self.address.format(**parameters)

    def roles(self, *ways: Way) -> tuple[str, ...]:
        """The roles that use it in one of these ways."""
        return tuple(use.role for use in self.uses if set(ways) & set(use.ways))

    @property
    def senders(self) -> tuple[str, ...]:
        return self.roles("send", "call")

    @property
    def receivers(self) -> tuple[str, ...]:
        """The roles that read its messages, beside those that may read the whole log."""
        return self.roles("last", "batch", "scan", "work", "serve", "hear")


def _all_workers(*ways: Way) -> tuple[Use, ...]:
    return tuple(Use(role, ways) for role in WORKERS)


CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="requests",
        address="fb.{run}.task.{pool}.{episode}",
        about="Episodes asked for. Expects sequence 0 on its subject; shared by the durable consumer task_{pool}.",
        messages=(EpisodeRequested,),
        kept="log",
        consumer="task_{pool}",
        uses=(
            Use("learner", ("send", "last", "scan")),
            Use("operator", ("send", "last")),
            Use("environment", ("work",)),
            Use("monitor", ("scan",)),
        ),
    ),
    Channel(
        name="episodes",
        address="fb.{run}.episode.{episode}",
        about="Claims, releases and the one result of an episode; each expects the last entry that its author read.",
        messages=(AttemptStarted, AttemptReleased, EpisodeFinished),
        kept="log",
        uses=(
            Use("environment", ("send", "batch")),
            Use("learner", ("send", "batch", "scan")),
            Use("operator", ("send", "batch", "scan")),
            Use("inference", ("scan",)),
            Use("monitor", ("scan",)),
        ),
    ),
    Channel(
        name="observations",
        address="fb.{run}.obs.{policy}.{lane}.{episode}",
        about="What the environment saw; lane is `any` or an inference worker's. Durable consumers obs_{policy}_{lane}.",
        messages=(Observation,),
        kept="log",
        consumer="obs_{policy}_{lane}",
        uses=(Use("environment", ("send", "last", "batch", "progress")), Use("inference", ("work", "scan"))),
    ),
    Channel(
        name="actions",
        address="fb.{run}.act.{lane}.{episode}",
        about="What the policy did, on the environment's lane. Expects the sequence that its Observation carries.",
        messages=(Action,),
        kept="log",
        consumer="act_{lane}",
        uses=(
            Use("inference", ("send", "last", "scan")),
            Use("environment", ("work", "last", "batch")),
            Use("learner", ("batch",)),
        ),
    ),
    Channel(
        name="policies",
        address="fb.{run}.policy.{policy}",
        about="Versions of the policy, and the lineages that fence them. Expects the last entry.",
        messages=(PolicyPublished, LineageStarted),
        kept="log",
        uses=(
            Use("learner", ("send", "last", "scan")),
            Use("inference", ("last", "scan")),
            Use("monitor", ("scan",)),
        ),
    ),
    Channel(
        name="transfers",
        address="fbwt.{run}.{policy}",
        about="Versions that engines may take from the learner while their file is written; a core message, not stored.",
        messages=(WeightsOffered,),
        uses=(Use("learner", ("send",)), Use("inference", ("hear",), of=("learner",))),
    ),
    Channel(
        name="training",
        address="fb.{run}.train.{policy}",
        about="The learner's journal. Expects the last entry: a learner that is refused has been replaced.",
        messages=(LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished),
        kept="log",
        uses=(Use("learner", ("send", "last", "scan")), Use("monitor", ("last", "scan"))),
    ),
    Channel(
        name="life",
        address="fb.{run}.life.{role}.{worker}",
        about="Workers come, drain, go, fail: all but gateways, which store nothing and say it in their heartbeats.",
        messages=(WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed),
        kept="log",
        uses=(*(Use(role, ("send",)) for role in WORKERS if role != "gateway"), Use("monitor", ("scan",))),
    ),
    Channel(
        name="floor",
        address="fb.{run}.floor",
        about="What has left the log for good. Expects the last entry.",
        messages=(FloorRaised,),
        kept="log",
        uses=(
            Use("recorder", ("send", "last")),
            Use("learner", ("send", "last")),
            Use("environment", ("last", "batch")),
        ),
    ),
    Channel(
        name="labels",
        address="fb.{run}.label.{episode}",
        about="What people say of an episode. Expects the last entry; no worker reads it.",
        messages=(EpisodeLabeled,),
        kept="log",
        uses=(Use("operator", ("send",)), Use("monitor", ("scan",))),
    ),
    Channel(
        name="operations",
        address="fb.{run}.operation.{role}.{key}",
        about="Who does what to the run, under its own public key: no other key may publish there, but for the admin's.",
        messages=(OperationRecorded,),
        kept="log",
        uses=(Use("operator", ("send",)), Use("monitor", ("scan",))),
    ),
    Channel(
        name="sessions",
        address="fb.{run}.session.{session}",
        about="The journal of a step-wise session.",
        messages=(SessionClaimed, SessionRecorded, SessionEnded),
        kept="log",
        uses=(Use("environment", ("send", "last", "batch", "scan")), Use("gateway", ("last", "scan"))),
    ),
    Channel(
        name="sessionCalls",
        address="fbrpc.{run}.{worker}.{session}",
        about="Calls into a step-wise session, answered on the reply subject.",
        messages=(SessionCall,),
        answers=(SessionAnswer,),
        uses=(
            Use("environment", ("serve",)),
            Use("gateway", ("call",), of=("environment",)),
            Use("operator", ("call",), of=("environment",)),
        ),
    ),
    Channel(
        name="lanes",
        address="fblane.{run}.{role}.{lane}",
        about="Who holds a lane; the last entry counts, by compare-and-set, in a stream of its own.",
        messages=(LaneLease,),
        kept="lanes",
        uses=(
            Use("environment", ("send", "last")),
            Use("inference", ("send", "last")),
            Use("recorder", ("send", "last")),
            Use("monitor", ("info",)),
        ),
    ),
    Channel(
        name="consumer_names",
        address="fblane.{run}.{role}.consumer.{consumer}",
        about="What the server calls a durable consumer, as bytes, stored by the admin for the role that works from it.",
        messages=(),
        kept="lanes",
        uses=(Use("environment", ("last",)), Use("inference", ("last",))),
    ),
    Channel(
        name="heartbeats",
        address="fbhb.{run}.{role}.{worker}",
        about="How a worker is, every two seconds; a core message, not stored.",
        messages=(Heartbeat,),
        uses=(
            *_all_workers("send"),
            Use("environment", ("hear",), of=("inference",)),
            Use("gateway", ("hear",), of=("environment",)),
            Use("learner", ("hear",), of=("inference", "learner")),
            Use("operator", ("hear",), of=WORKERS),
            Use("monitor", ("hear",), of=WORKERS),
            Use("admin", ("hear",), of=WORKERS),
        ),
    ),
    Channel(
        name="control",
        address="fbctl.{run}.{role}.{worker}.{command}",
        about="Drain, cancel, ping, to one worker or to `all` of a role; answered on the reply subject. Rights are by command.",
        messages=(ControlRequested,),
        answers=(ControlAnswered,),
        uses=(
            *_all_workers("serve"),
            Use("operator", ("call",), of=WORKERS),
            Use("environment", ("call",), of=("inference",), command="ping"),
            Use("gateway", ("call",), of=("environment",), command="ping"),
        ),
    ),
    Channel(
        name="services",
        address="$SRV.>",
        about="NATS's own discovery of services: PING, INFO and STATS, answered by every worker.",
        uses=(*_all_workers("serve"), Use("monitor", ("call",), of=WORKERS)),
    ),
    Channel(
        name="weights",
        address="$O.fbweights_{run}.{part}.{object}",
        about="Weights and their manifests in a bucket beside the log, checked against the digests in the log.",
        kept="bucket",
        uses=(Use("learner", ("send", "fetch", "purge")), Use("inference", ("fetch",))),
    ),
    Channel(
        name="images",
        address="$O.fbimages_{run}.{part}.{object}",
        about="Images of observations in a bucket of their own, named by their digests; who stores them removes none.",
        kept="images",
        uses=(
            Use("environment", ("send", "info")),
            Use("learner", ("fetch",)),
            Use("inference", ("fetch",)),
            Use("gateway", ("fetch",)),
        ),
    ),
    Channel(
        name="log",
        address="fb.{run}.>",
        about="The log as a whole. A way that is given here is given for every channel in the log.",
        kept="log",
        uses=(
            Use("operator", ("info", "batch", "scan")),
            Use("environment", ("info",)),
            Use("inference", ("info",)),
            Use("learner", ("info", "batch", "scan")),
            Use("recorder", ("info", "batch", "scan", "floors", "purge")),
            Use("gateway", ("info",)),
            Use("monitor", ("info", "batch", "scan")),
        ),
    ),
)

BY_NAME: Mapping[str, Channel] = MappingProxyType({channel.name: channel for channel in CHANNELS})

STORED: Mapping[str, tuple[type[Message], ...]] = MappingProxyType(
    {channel.address.split(".")[2]: channel.messages for channel in CHANNELS if channel.kept == "log" and channel.messages}
)
"""What the log holds, by the third token of the subject that it is stored on."""


def covers_log(role: str, way: Way) -> bool:
    """True if a role may use every channel in the log this way: one ``batch`` reads all, for any purpose."""
    if way == "last":
        return covers_log(role, "batch")
    channels = [channel for channel in CHANNELS if channel.kept == "log"] if way == "batch" else [BY_NAME["log"]]
    return any(role in channel.roles(way) for channel in channels)
