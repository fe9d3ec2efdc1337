"""Workers come, go and say how they are. On ``life.<role>.<worker>``, except heartbeats, which the log does not keep."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus_schemas.message import Message
from fleetbus_schemas.names import Name, OptionalName

WorkerRole = Literal["environment", "inference", "learner", "recorder", "gateway", "monitor"]


class SlotShare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run's part of an inference worker that serves several: of ``slots`` in all, its ``weight`` of the sum ``weights`` of
    the runs that are served at the moment, and no more than ``quota`` (0: all). The other runs use ``used_by_others``
    together; they are not named, for they may be somebody else's."""

    slots: int = 0
    weight: float = 1.0
    weights: float = 1.0
    quota: int = 0
    used_by_others: int = 0


class WorkerStarted(Message, frozen=True, kw_only=True):
    """Every worker → log, when it is ready to work. ``version`` is that of its package, empty where that is not installed;
    ``protocol`` is `fleetbus_schemas.protocol.PROTOCOL` of its program, 0 of those that told none. ``share`` is that of a
    run in a worker that serves several."""

    role: WorkerRole
    worker: Name
    slots: int = 0
    lane: OptionalName = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    protocol: int = 0
    share: SlotShare | None = None


class WorkerDraining(Message, frozen=True, kw_only=True):
    """Every worker → log: takes no new work, finishes or hands back what it has."""

    role: WorkerRole
    worker: str
    in_flight: int = 0


class WorkerStopped(Message, frozen=True, kw_only=True):
    """Every worker → log: the last entry of a clean stop."""

    role: WorkerRole
    worker: str


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Every worker → log: the last word of one that stops because of an error."""

    role: WorkerRole
    worker: str
    error_class: str
    error: str


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of an inference worker's engine; None is what it does not report.

    ``running`` and ``waiting`` count requests; ``kv_cache_use`` is the share of the cache that they hold, the largest of
    several engines. Of a server that others ask too, these are all of its requests. Over the last seconds,
    ``tokens_per_second`` were sampled for this worker, and the share ``prefix_hits`` of its prompt tokens was found in the
    cache. ``preemptions`` are requests that lost their place in the cache and were computed again, since the engine or
    server began.
    """

    running: int | None = None
    waiting: int | None = None
    kv_cache_use: float | None = None
    preemptions: int | None = None
    tokens_per_second: float | None = None
    prefix_hits: float | None = None


class Heartbeat(Message, frozen=True, kw_only=True):
    """Every worker → all listeners, on ``fbhb.<run>.<role>.<worker>``; a core message, not stored.

    ``policy_version`` is what an inference worker samples from or a learner published last; ``counters`` only ever grow.
    An environment worker hosts ``sessions`` of at most ``session_slots`` step-wise sessions. ``problem`` is what keeps the
    worker from its work at the moment, in one line; empty while it works. ``paused``: a learner that was asked to request no
    new groups. ``engine`` is what an inference worker's engine says of itself. ``pools`` are those that an environment worker
    takes episodes of. ``version`` and ``protocol`` are as in `WorkerStarted`. ``share`` is that of a run in an inference worker
    that serves several; ``slots`` are then those that the run would get at the moment. ``policy`` is what a learner trains,
    or an inference worker serves. ``takes_ahead``: an inference worker answers turns that are asked for ahead of others.
    """

    role: WorkerRole
    worker: Name
    slots: int = 0
    in_flight: int = 0
    policy_version: int = -1
    lane: OptionalName = ""
    draining: bool = False
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    session_slots: int = 0
    sessions: int = 0
    problem: str = ""
    paused: bool = False
    engine: EngineLoad | None = None
    pools: tuple[str, ...] = ()
    version: str = ""
    protocol: int = 0
    share: SlotShare | None = None
    policy: OptionalName = ""
    takes_ahead: bool = False


class LaneLease(Message, frozen=True, kw_only=True):
    """The holder of a lane: stored on ``fblane.<run>.<role>.<lane>`` by compare-and-set, renewed with the heartbeat.

    An empty ``worker`` means free. Valid for `lease_seconds` of server time after it was stored.
    """

    worker: OptionalName
    nonce: str
    lease_seconds: float


class ControlRequested(Message, frozen=True, kw_only=True):
    """Operator or requester → workers, on ``fbctl.<run>.<role>.<worker|all>.<command>``. ``pause`` and ``resume`` are for the
    learner: that it requests no new groups, and that it does again. A command that is not its subject's is ignored.
    ``author`` is who asks for a ``cancel``, for the episode's result."""

    command: Literal["drain", "cancel", "ping", "pause", "resume"]
    episodes: tuple[str, ...] = ()
    author: str = ""


class ControlAnswered(Message, frozen=True, kw_only=True):
    """The answer to `ControlRequested`: which worker did what. ``busy_with`` is what it holds: episodes and step-wise sessions
    in an environment worker, ``episode.attempt.turn`` in an inference worker."""

    worker: Name
    role: WorkerRole
    done: bool
    detail: str = ""
    busy_with: tuple[str, ...] = ()
