"""A bare NATS client with the key of one user, for what fleetbus's own client would never send; and what it can be seen to do.

Above it are the tests of rights; below it nats-py. It asks from an inbox of its own, and knows an answer from a refusal.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from fleetbus.auth.access import build_access
from fleetbus.auth.permissions import build_inbox_prefix
from fleetbus.bus.streams import plan_run
from tests.support.secured_server import SecuredServer

ANSWER_SECONDS = 3.0
NO_RESPONDERS = "503"


class BareClient:
    """One connection. ``violations`` are the server's words for what the permissions refused."""

    def __init__(self, user: str, client: Client, violations: list[str]) -> None:
        self.user = user
        self.client = client
        self.violations = violations
        self.inbox = f"{build_inbox_prefix(user)}.{secrets.token_hex(6)}"

    async def send(self, subject: str, payload: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Without waiting for anything."""
        await self.client.publish(subject, payload, reply=reply, headers=headers)

    async def settle(self) -> None:
        """Until the server has taken in what was sent before. nats-py writes a PING before what still waits to be written."""
        for _ in range(2):
            await self.client.flush(timeout=30)

    async def ask(self, subject: str, payload: bytes = b"", *, headers: dict[str, str] | None = None) -> Msg | None:
        """The answer; None where the permissions refuse, nobody answers, or no answer comes."""
        inbox, known = f"{self.inbox}.{secrets.token_hex(4)}", len(self.violations)
        subscription = await self.client.subscribe(inbox)
        try:
            await self.settle()
            await self.send(subject, payload, reply=inbox, headers=headers)
            await self.settle()
            if len(self.violations) > known:
                return None
            with anyio.move_on_after(ANSWER_SECONDS):
                answer = await subscription.next_msg(timeout=None)
                return None if (answer.headers or {}).get("Status") == NO_RESPONDERS else answer
            return None
        finally:
            await subscription.unsubscribe()


@asynccontextmanager
async def bare_client(secured: SecuredServer, user: str, run: str) -> AsyncIterator[BareClient]:
    """Connected for the length of the block."""
    access = build_access(user, str(secured.folder), run)
    violations: list[str] = []

    async def note(error: Exception) -> None:
        violations.append(str(error))

    client = await nats.connect(
        secured.server.url,
        nkeys_seed=str(access["nkey_seed"]),
        tls=access["tls"],
        tls_handshake_first=True,
        inbox_prefix=build_inbox_prefix(user).encode(),
        error_cb=note,
        allow_reconnect=False,
    )
    try:
        yield BareClient(user, client, violations)
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()


async def describe_state(admin: BareClient, run: str) -> dict[str, Any]:
    """What attacks must leave as it is: streams, their configuration and their entries by subject; durable consumers, how they
    are set up and how far they are."""
    state: dict[str, Any] = {}
    for stream in (await _answer(admin, "STREAM.NAMES"))["streams"] or []:
        info = await _answer(admin, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
        state[stream] = {
            "config": info["config"],
            "first": info["state"]["first_seq"],
            "last": info["state"]["last_seq"],
            "subjects": info["state"].get("subjects", {}),
        }
    durable = {f"{each.name}" for each in plan_run(run, lanes=1024).consumers}
    for consumer in (await _answer(admin, f"CONSUMER.LIST.fb_{run}"))["consumers"] or []:
        if consumer["name"].rpartition("-")[0] in durable:
            fields = ("delivered", "ack_floor", "num_ack_pending", "num_redelivered")
            state[consumer["name"]] = {"config": consumer["config"]} | {
                field: consumer[field].get("stream_seq") if isinstance(consumer[field], dict) else consumer[field]
                for field in fields
            }
    return state


async def _answer(admin: BareClient, question: str, payload: Any = None) -> dict[str, Any]:
    answer = await admin.ask(f"$JS.API.{question}", b"" if payload is None else json.dumps(payload).encode())
    assert answer is not None, question
    decoded: dict[str, Any] = json.loads(answer.data)
    assert "error" not in decoded, decoded
    return decoded
