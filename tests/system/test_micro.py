"""Workers as NATS micro services: whoever asks with the protocol of ADR-32 finds all of them on a real server."""

from __future__ import annotations

import json
from typing import Any

import anyio
import nats

from fleetbus.delivery.service_api import Microservice
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import Subjects
from tests.support.servers import connect

RUN = "micro"
WORKERS = (("environment", "env-1"), ("environment", "env-2"), ("inference", "inf-1"))


async def answers(client: Any, subject: str, count: int) -> list[dict[str, Any]]:
    """As many answers to one question as are expected; raises `TimeoutError` when fewer come."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.flush()
    await client.publish(subject, b"", reply=inbox)
    found = [json.loads((await subscription.next_msg(timeout=20)).data) for _ in range(count)]
    await subscription.unsubscribe()
    return found


async def test_ping_info_and_stats_find_every_worker(nats_server: Any) -> None:
    subjects = Subjects(RUN)
    async with connect(nats_server.url, run=RUN, role="test") as bus, anyio.create_task_group() as group:
        for role, worker in WORKERS:
            group.start_soon(Microservice(bus, subjects, role=role, worker=worker).run)
        await until_served(bus)
        client = await nats.connect(nats_server.url)
        try:
            pings = await answers(client, "$SRV.PING", 3)
            assert {ping["id"] for ping in pings} == {f"{RUN}-{worker}" for _, worker in WORKERS}
            assert {ping["type"] for ping in pings} == {"io.nats.micro.v1.ping_response"}
            infos = await answers(client, "$SRV.INFO.fleetbus-environment", 2)
            assert {info["metadata"]["worker"] for info in infos} == {"env-1", "env-2"}
            assert infos[0]["endpoints"][0]["subject"].startswith(f"fbctl.{RUN}.environment.env-")
            (stats,) = await answers(client, f"$SRV.STATS.fleetbus-inference.{RUN}-inf-1", 1)
            assert stats["type"] == "io.nats.micro.v1.stats_response" and stats["started"].endswith("+00:00")
            assert stats["endpoints"][0]["num_requests"] >= 1
        finally:
            await client.close()
        group.cancel_scope.cancel()


async def until_served(bus: Any) -> None:
    """Until all three answer: a question to each by its own name."""
    for role, worker in WORKERS:
        while True:
            try:
                await bus.request(f"$SRV.PING.fleetbus-{role}.{RUN}-{worker}", b"", timeout=2)
                break
            except (NoResponders, RequestUnanswered):
                await anyio.sleep(0.02)


def test_questions_to_others_are_left_to_them() -> None:
    service = Microservice(None, Subjects(RUN), role="inference", worker="inf-1")  # type: ignore[arg-type]
    asked = {
        subject: service.parse_verb(subject) for subject in ("$SRV.PING", "$SRV.PING.fleetbus-inference", "$SRV.STATS.other")
    }
    assert asked == {"$SRV.PING": "PING", "$SRV.PING.fleetbus-inference": "PING", "$SRV.STATS.other": None}
    assert service.parse_verb("$SRV.DELETE") is None and service.parse_verb("$SRV.INFO.fleetbus-inference.someone") is None
