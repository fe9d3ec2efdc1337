"""Streams and consumers as data: what `fleetbus up` and `fleetbus init` create, and what workers bind to by name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus_schemas import ANY_LANE, Subjects
from fleetbus_schemas.channels import BY_NAME, CHANNELS

TASK_LEASE_SECONDS = 10.0
"""``ack_wait`` of requests: a dead environment worker's episodes are elsewhere after this."""

OBSERVATION_LEASE_SECONDS = 3.0
"""``ack_wait`` of observations: a stopped inference worker swallows what it pulled until then."""

ACTION_LEASE_SECONDS = 2.0
"""``ack_wait`` of actions on an environment lane."""


MAX_CONSUMERS = 1 << 16
"""Of a log: two per lane and policy, and one for everybody who reads. A server's own limit may be 1,000; this is set at the
stream, where it holds. 10,240 lanes of five policies fit in it."""


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One file-backed stream. ``max_bytes`` 0 is unlimited; ``max_per_subject`` 0 keeps everything; ``max_consumers`` 0 leaves
    it to the server how many there may be, ``replicas`` 0 to it and its administrator how many servers keep a copy."""

    name: str
    subjects: tuple[str, ...]
    max_bytes: int = 0
    max_per_subject: int = 0
    max_consumers: int = 0
    duplicate_window_seconds: float = 120.0
    replicas: int = 0
    first_sequence: int = 1
    """Of the first entry that is stored in it, if it is made now: not 1 for what is restored."""


class ConsumerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One durable pull consumer of the log: explicit ack, no limit on pending acks (credits are the only limit)."""

    name: str
    filter: str
    ack_wait_seconds: float


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run needs on the server: its log, its lane leases, the consumers of the log."""

    run: str
    log: StreamPlan
    lanes: StreamPlan
    consumers: tuple[ConsumerPlan, ...]


def log_stream(run: str) -> str:
    """The stream that is the run's log."""
    return f"fb_{run}"


def lane_stream(run: str) -> str:
    """The stream beside the log in which lanes are leased: of each lane its last entry alone."""
    return f"fblane_{run}"


API = "$JS.API"
"""Where JetStream is asked on a server without accounts, and in the account that holds the streams."""

IMPORTED_API = "fbapi"
"""Where it is asked in an account that imports some of it: in an account without streams the server itself answers on `API`,
that there are none."""


def work_alias(run: str) -> str:
    """Name of the log in questions about a durable consumer by a user that may not know what the server calls it: its account
    knows the consumer by its plain name."""
    return f"fbwork_{run}"


def name_subject(run: str, consumer: str) -> tuple[str, str]:
    """The role that works from a durable consumer, and where it finds what the server calls that consumer."""
    channel = next(each for each in CHANNELS if each.consumer and consumer.startswith(each.consumer.partition("{")[0]))
    (role,) = channel.roles("work")
    return role, Subjects(run).consumer_name(role, consumer)


def tasks_consumer(pool: str) -> str:
    """The durable consumer that the environment workers of a pool share."""
    return BY_NAME["requests"].consumer.format(pool=pool)


def observations_consumer(policy: str, lane: str) -> str:
    """The durable consumer of the observations for a policy on one inference lane, or on `any`."""
    return BY_NAME["observations"].consumer.format(policy=policy, lane=lane)


def actions_consumer(lane: str) -> str:
    """The durable consumer of the Actions on one environment worker's lane."""
    return BY_NAME["actions"].consumer.format(lane=lane)


READER = "read_"
"""Begins the names of the consumers that a log is read by."""

_WORK = [[channel.consumer.partition("_")[0]] for channel in CHANNELS if channel.consumer]


def takes_work(name: str, subject: str) -> bool:
    """True if a consumer of this name and filter may be one that work is taken from. A monitor's rights list names that begin
    as a reader's, and a gateway's a filter that is not of work, so neither's are."""
    return not name.startswith(READER) and subject.split(".")[2:3] in _WORK


def environment_lanes(count: int) -> tuple[str, ...]:
    """The lanes that environment workers claim: ``e0``, ``e1``, ..."""
    return tuple(f"e{index}" for index in range(count))


def inference_lanes(count: int) -> tuple[str, ...]:
    """The lanes that inference workers claim, beside `any`: ``i0``, ``i1``, ..."""
    return tuple(f"i{index}" for index in range(count))


def plan_run(
    run: str,
    *,
    pools: Sequence[str] = ("default",),
    policies: Sequence[str] = ("default",),
    lanes: int = 16,
    max_bytes: int = 4 << 30,
    duplicate_window_seconds: float = 120.0,
    replicas: int = 0,
) -> RunPlan:
    """The plan of one run: ``lanes`` environment lanes, and as many inference lanes per policy."""
    subjects = Subjects(run)
    consumers = [
        ConsumerPlan(name=tasks_consumer(pool), filter=subjects.tasks(pool), ack_wait_seconds=TASK_LEASE_SECONDS)
        for pool in pools
    ]
    consumers += [
        ConsumerPlan(
            name=observations_consumer(policy, lane),
            filter=subjects.observations(policy, lane),
            ack_wait_seconds=OBSERVATION_LEASE_SECONDS,
        )
        for policy in policies
        for lane in (ANY_LANE, *inference_lanes(lanes))
    ]
    consumers += [
        ConsumerPlan(name=actions_consumer(lane), filter=subjects.actions(lane), ack_wait_seconds=ACTION_LEASE_SECONDS)
        for lane in environment_lanes(lanes)
    ]
    return RunPlan(
        run=run,
        log=StreamPlan(
            name=log_stream(run),
            subjects=(subjects.log,),
            max_bytes=max_bytes,
            max_consumers=MAX_CONSUMERS,
            duplicate_window_seconds=duplicate_window_seconds,
            replicas=replicas,
        ),
        lanes=StreamPlan(name=lane_stream(run), subjects=(subjects.lanes,), max_per_subject=1, replicas=replicas),
        consumers=tuple(consumers),
    )
