"""Retention calls of the JetStream API: ack floors of consumers, and purging entries by subject.

Above it is the bus; below it the API. It decides nothing: the caller says what may be removed.
"""

from __future__ import annotations

from typing import Any

from fleetbus.bus.base import ConsumerFloor
from fleetbus.bus.nats.api import ApiRefused, JetStreamApi
from fleetbus.bus.nats.protocol import check_subject
from fleetbus.bus.streams import takes_work


async def list_floors(api: JetStreamApi, stream: str) -> list[ConsumerFloor]:
    """All consumers that work is taken from, by name; the server lists them in pages. Readers are left out, and whatever else
    has been made: who may read may make a consumer that never acks, and trimming would wait for it for ever."""
    found: dict[str, dict[str, Any]] = {}
    seen = 0
    while True:
        answer = await api.ask(f"CONSUMER.LIST.{stream}", {"offset": seen})
        page = answer.get("consumers") or []
        found |= {info["name"]: info for info in page}
        seen += len(page)
        if not page or seen >= answer["total"]:
            break
    return [_build_floor(name, info) for name, info in sorted(found.items()) if _is_of_work(name, info["config"])]


def _is_of_work(name: str, config: dict[str, Any]) -> bool:
    return config.get("ack_policy", "none") != "none" and takes_work(name, config.get("filter_subject", ""))


async def read_floor(api: JetStreamApi, stream: str, consumer: str) -> ConsumerFloor:
    """That of one consumer; raises `ApiRefused` when there is none of that name."""
    return _build_floor(consumer, await api.ask(f"CONSUMER.INFO.{stream}.{consumer}"))


def _build_floor(name: str, info: dict[str, Any]) -> ConsumerFloor:
    return ConsumerFloor(
        name=name, filter=info["config"].get("filter_subject", ">"), ack_floor=int(info["ack_floor"]["stream_seq"])
    )


async def count_unacked(api: JetStreamApi, stream: str, consumer: str) -> int:
    """Number of messages of one consumer that are not delivered, or not acked; 0 while there is no such consumer."""
    try:
        info = await api.ask(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiRefused:
        return 0
    return int(info["num_pending"]) + int(info["num_ack_pending"])


async def list_subjects(api: JetStreamApi, stream: str, subject: str) -> list[str]:
    """The subjects with entries that match; the server lists them in pages."""
    found: set[str] = set()
    offset = 0
    while True:
        answer = await api.ask(f"STREAM.INFO.{stream}", {"subjects_filter": check_subject(subject), "offset": offset})
        page = answer["state"].get("subjects") or {}
        found |= page.keys()
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return list(found)


async def purge(api: JetStreamApi, stream: str, subject: str, below: int) -> None:
    """Remove the entries on a subject (wildcards allowed) with a sequence below this one, now or not at all."""
    if below > 1:
        await api.ask_once(f"STREAM.PURGE.{stream}", {"filter": check_subject(subject), "seq": below})
