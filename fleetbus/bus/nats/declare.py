"""Streams and consumers as planned: created where they are missing, compared where they exist, never changed.

Above it is the bus; below it the API. Only what the plan says is compared, so an administrator may add replicas or placement.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import anyio

from fleetbus.bus.nats.api import (
    CONSUMER_EXISTS,
    CONSUMER_NOT_FOUND,
    NO_CONSUMERS_LEFT,
    NO_ROOM,
    STREAM_NAME_IN_USE,
    STREAM_NOT_FOUND,
    ApiRefused,
    JetStreamApi,
)
from fleetbus.bus.nats.run_protocol import raise_protocol
from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import ConsumerPlan, RunPlan, StreamPlan
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import UserError

MAX_WAITING_PULLS = 4096
"""Pull requests that may wait at one consumer: a few per worker."""

DECLARED_AT_ONCE = 32
"""Consumers that a server is asked for at the same time."""

SMALLEST_LOG = 128 << 20
"""Bytes that a log gets at least where the server has not as much left as the plan wants."""

_WANTED = "fleetbus_max_bytes"
"""In the metadata of a smaller log: what its plan wanted, so that the same plan finds it as it is."""

_SECOND_NS = 1_000_000_000

_HINTS = {
    NO_CONSUMERS_LEFT: "raise max_consumers of the account, or declare fewer lanes (--nats-lanes)",
    10027: "raise max_streams of the account, or remove runs that are over (fleetbus runs rm RUN --nats URL)",
    10039: "enable JetStream for this account",
    10065: "another stream stores these subjects: remove it, or choose another --run",
    10113: "set max_bytes_required to false in the account",
}
"""What to do about the limits of an account, by JetStream error code."""

_PLAIN: dict[str, Any] = {
    "max_age": 0,
    "max_msgs": -1,
    "max_msg_size": -1,
    "no_ack": False,
    "sealed": False,
    "allow_rollup_hdrs": False,
    "persist_mode": "default",
    "mirror": None,
    "sources": None,
    "subject_transform": None,
}
"""What would remove, refuse or change entries, with the value that does not; a server may leave such a field out."""

_LIMITS = ("max_bytes", "duplicate_window", "max_consumers")

log = logging.getLogger(__name__)


async def declare(api: JetStreamApi, plan: RunPlan) -> None:
    """See `fleetbus.bus.base.Bus.declare`; raises `UserError` naming the first field that differs from the plan, or what the
    server refuses."""
    try:
        await _declare_stream(api, plan.log)
        await _declare_stream(api, plan.lanes)
        await declare_bucket(api, weights_bucket(plan.run), replicas=plan.log.replicas)
        await declare_bucket(api, images_bucket(plan.run), replicas=plan.log.replicas, rollups=False)
        await _declare_consumers(api, plan.log.name, plan.consumers)
        await raise_protocol(api, plan.log.name)
    except ApiRefused as refused:
        hint = _HINTS.get(refused.code, "see the server's configuration")
        raise UserError(f"the NATS server refuses to declare run {plan.run}: {refused}: {hint}; then repeat this") from refused


async def declare_bucket(api: JetStreamApi, bucket: str, *, replicas: int = 0, rollups: bool = True) -> None:
    """An object bucket; one that exists is left as it is. Workers with accounts of their own may not create any. With
    ``rollups``, as clients of others expect it, whoever may store may also remove: a header of a message says so."""
    stream = f"OBJ_{bucket}"
    try:
        await api.ask(f"STREAM.INFO.{stream}")
        return
    except ApiRefused as missing:
        if missing.code != STREAM_NOT_FOUND:
            raise
    try:
        await api.ask(f"STREAM.CREATE.{stream}", bucket_config(bucket, replicas=replicas, rollups=rollups))
    except ApiRefused as refused:
        if refused.code != STREAM_NAME_IN_USE:
            raise


def bucket_config(bucket: str, *, replicas: int = 0, rollups: bool = True) -> dict[str, object]:
    """The stream of a bucket as NATS's own clients create it."""
    return {
        "name": f"OBJ_{bucket}",
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": -1,
        "allow_rollup_hdrs": rollups,
        "allow_direct": True,
        "num_replicas": replicas or 1,
    }


def stream_config(plan: StreamPlan) -> dict[str, Any]:
    """A stream as the server's API takes it. The log refuses what does not fit; a stream of last values forgets the older."""
    return {
        "name": plan.name,
        "subjects": list(plan.subjects),
        "retention": "limits",
        "storage": "file",
        "discard": "old" if plan.max_per_subject else "new",
        "max_bytes": plan.max_bytes or -1,
        "max_msgs_per_subject": plan.max_per_subject or -1,
        "allow_direct": True,
        "duplicate_window": int(plan.duplicate_window_seconds * _SECOND_NS),
        **({"max_consumers": plan.max_consumers} if plan.max_consumers else {}),
        **({"num_replicas": plan.replicas} if plan.replicas else {}),
        **({"first_seq": plan.first_sequence} if plan.first_sequence > 1 else {}),
    }


def consumer_config(plan: ConsumerPlan) -> dict[str, object]:
    """A durable pull consumer as the server's API takes it."""
    return {
        "durable_name": plan.name,
        "filter_subject": plan.filter,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(plan.ack_wait_seconds * _SECOND_NS),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "replay_policy": "instant",
        "max_waiting": MAX_WAITING_PULLS,
    }


async def _declare_stream(api: JetStreamApi, plan: StreamPlan) -> None:
    wanted = stream_config(plan)
    try:
        found = await api.ask(f"STREAM.INFO.{plan.name}")
    except ApiRefused as missing:
        if missing.code != STREAM_NOT_FOUND:
            raise
        if await _create_stream(api, plan, wanted):
            return
        found = await api.ask(f"STREAM.INFO.{plan.name}")
    config = found["config"]
    if (config.get("metadata") or {}).get(_WANTED) == str(plan.max_bytes):
        wanted["max_bytes"] = config["max_bytes"]
    raised = {"max_bytes": wanted["max_bytes"]} if _is_larger(wanted["max_bytes"], config["max_bytes"]) else {}
    if config.get("max_consumers", -1) < wanted.pop("max_consumers", -1):
        raised["max_consumers"] = plan.max_consumers
    _compare(f"stream {plan.name}", wanted, config | raised)
    _compare(f"stream {plan.name}", _PLAIN, _PLAIN | {key: value for key, value in config.items() if value})
    if raised:
        await api.ask(f"STREAM.UPDATE.{plan.name}", config | raised)
        log.info("nats: limits of %s raised: %s", plan.name, ", ".join(f"{name} to {value}" for name, value in raised.items()))


def check_log(plan: StreamPlan, config: dict[str, Any], *, reading: bool = False) -> None:
    """Check that the stream called as a run's log is one, with any limits: a worker on another would wait without end, or
    lose entries. For ``reading`` alone its subjects (a mirror has none) and its retention decide. Raises `UserError`."""
    wanted = {field: value for field, value in stream_config(plan).items() if field not in _LIMITS}
    if reading:
        wanted = {field: wanted[field] for field in ("retention",) + (() if config.get("mirror") else ("subjects",))}
    _compare(f"stream {plan.name}", wanted, config)
    if not reading:
        _compare(f"stream {plan.name}", _PLAIN, _PLAIN | {key: value for key, value in config.items() if value})


def find_erasing_limits(config: dict[str, Any]) -> tuple[str, ...]:
    """The limits in the configuration of a log that remove entries by themselves, as ``name value``."""
    limits = {name: config.get(name) or 0 for name in ("max_age", "max_msgs", "max_msgs_per_subject", "max_bytes")}
    if config.get("discard") == "new":  # what does not fit is refused
        del limits["max_bytes"], limits["max_msgs"]
        if config.get("discard_new_per_subject"):
            del limits["max_msgs_per_subject"]
    limits["max_age"] = limits["max_age"] // _SECOND_NS
    return tuple(f"{name} {value}" for name, value in limits.items() if value > 0)


def _is_larger(wanted: int, found: int) -> bool:
    """True if a limit in bytes (-1: none) is above another."""
    return found != -1 and (wanted == -1 or wanted > found)


async def _create_stream(api: JetStreamApi, plan: StreamPlan, wanted: dict[str, Any]) -> bool:
    """Create the stream; False if somebody else did. A server reserves all that a log may grow to when it is created: where
    there is not so much left, half of it is asked for, and so on. Raises `UserError` where even `SMALLEST_LOG` has no room."""
    size = plan.max_bytes
    while True:
        given = {"max_bytes": size, "metadata": {_WANTED: str(plan.max_bytes)}} if size != plan.max_bytes else {}
        try:
            await api.ask(f"STREAM.CREATE.{plan.name}", wanted | given)
        except ApiRefused as refused:
            if refused.code == STREAM_NAME_IN_USE:
                return False
            if refused.code not in NO_ROOM:
                raise
            if size // 2 < SMALLEST_LOG:
                raise UserError(_no_storage(plan, refused)) from refused
            size //= 2
        else:
            if given:
                log.warning("nats: server storage is too small; limiting %s to %d bytes", plan.name, size)
            return True


def _no_storage(plan: StreamPlan, refused: ApiRefused) -> str:
    return (
        f"the NATS server has no storage left to reserve for stream {plan.name} ({refused}): remove runs that are over "
        "(fleetbus runs list --nats URL, fleetbus runs rm RUN --nats URL), give this one less (--nats-max-bytes), or raise "
        "max_file_store in the server's configuration"
    )


async def _declare_consumers(api: JetStreamApi, stream: str, plans: Sequence[ConsumerPlan]) -> None:
    """All of them, a few at a time: each is a file that the server syncs."""
    room = anyio.Semaphore(DECLARED_AT_ONCE)

    async def declare_one(plan: ConsumerPlan) -> None:
        async with room:
            await _declare_consumer(api, stream, plan)

    async with open_first_error_task_group() as tasks:
        for plan in plans:
            tasks.start_soon(declare_one, plan)


async def _declare_consumer(api: JetStreamApi, stream: str, plan: ConsumerPlan) -> None:
    wanted = consumer_config(plan)
    try:
        found = await api.ask(f"CONSUMER.INFO.{stream}.{plan.name}")
    except ApiRefused as missing:
        if missing.code != CONSUMER_NOT_FOUND:
            raise
        question = {"stream_name": stream, "config": wanted, "action": "create"}
        try:
            await api.ask(f"CONSUMER.CREATE.{stream}.{plan.name}", question)
            return
        except ApiRefused as refused:
            if refused.code not in CONSUMER_EXISTS:
                raise
        found = await api.ask(f"CONSUMER.INFO.{stream}.{plan.name}")
    _compare(f"consumer {plan.name} of stream {stream}", wanted, found["config"])


def _compare(what: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for field, value in wanted.items():
        if found.get(field) != value:
            raise UserError(
                f"{what} exists with {field} {found.get(field)!r} instead of {value!r} and was left as it is: "
                "correct it there or in the settings, or choose another --run"
            )
