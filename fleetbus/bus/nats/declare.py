"""Streams and consumers as planned: created where they are missing, compared where they exist, never changed.

Above it is the bus; below it the API. Only what the plan says is compared, so an administrator may add replicas or placement.
"""

from __future__ import annotations

from typing import Any

from fleetbus.bus.nats.api import (
    CONSUMER_EXISTS,
    CONSUMER_NOT_FOUND,
    STREAM_NAME_IN_USE,
    STREAM_NOT_FOUND,
    ApiRefused,
    JetStreamApi,
)
from fleetbus.bus.streams import ConsumerPlan, RunPlan, StreamPlan
from fleetbus.errors import BusError

MAX_WAITING_PULLS = 4096
"""Pull requests that may wait at one consumer: a few per worker."""

_SECOND_NS = 1_000_000_000


async def declare(api: JetStreamApi, plan: RunPlan) -> None:
    """See `fleetbus.bus.base.Bus.declare`; raises `BusError` naming the first field that differs from the plan."""
    await _declare_stream(api, plan.log)
    await _declare_stream(api, plan.lanes)
    for consumer in plan.consumers:
        await _declare_consumer(api, plan.log.name, consumer)


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
        **({"num_replicas": plan.replicas} if plan.replicas else {}),
    }


def consumer_config(plan: ConsumerPlan) -> dict[str, Any]:
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
        try:
            await api.ask(f"STREAM.CREATE.{plan.name}", wanted)
            return
        except ApiRefused as refused:
            if refused.code != STREAM_NAME_IN_USE:
                raise
        found = await api.ask(f"STREAM.INFO.{plan.name}")
    _compare(f"stream {plan.name}", wanted, found["config"])


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
            raise BusError(f"{what} exists with {field} {found.get(field)!r} instead of {value!r}; it was left as it is")
