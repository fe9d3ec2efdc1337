"""Faults to plant into the bus over NATS, which the simulation has not. See `tests/system/test_planted_faults_elsewhere.py`."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

import fleetbus.bus.nats.bus as bus
import fleetbus.bus.nats.declare as declare
import fleetbus.bus.nats.publisher as publisher
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.log_identity import LogIdentity
from fleetbus.bus.nats.protocol import header_block
from fleetbus.bus.nats.pull_requests import PullRequests
from fleetbus.bus.nats.pull_subscription import NatsDelivery, NatsSubscription
from fleetbus.bus.nats.retention_api import purge


def expectations_not_sent(patch: pytest.MonkeyPatch) -> None:
    """A compare-and-set is a plain publish."""
    patch.setattr(publisher, "header_block", lambda message_id, expected_last: header_block(message_id, None))


def ids_made_anew(patch: pytest.MonkeyPatch) -> None:
    """The id that a message is given is not the one that is sent."""

    def faulty(message_id: str, expected_last: int | None) -> bytes:
        return header_block(secrets.token_hex(8), expected_last)

    patch.setattr(publisher, "header_block", faulty)


def credits_lost_at_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    """What was asked of a connection that broke is not asked for again: the worker takes less and less, and at last nothing."""
    detach = PullRequests.detach

    def faulty(self: PullRequests, late: Any = None) -> int:
        self.asked = 0
        return detach(self, late)

    patch.setattr(PullRequests, "detach", faulty)


def what_was_not_taken_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker that leaves gives back nothing of what it had been sent: it waits for the end of its lease."""
    leave = NatsSubscription.leave

    async def faulty(self: NatsSubscription) -> None:
        self._queue.items.clear()
        await leave(self)

    patch.setattr(NatsSubscription, "leave", faulty)


def leases_not_extended(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: NatsDelivery) -> None:
        """Says nothing."""

    patch.setattr(NatsDelivery, "extend", faulty)


def log_taken_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """Who comes back to a log compares nothing."""

    async def faulty(self: LogIdentity, last_read: int, last_time_ns: int) -> bool:
        return True

    patch.setattr(LogIdentity, "check", faulty)


def position_given_again_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "report_lost", lambda *arguments: None)


def purge_one_too_far(patch: pytest.MonkeyPatch) -> None:
    async def faulty(api: Any, stream: str, subject: str, below: int) -> None:
        await purge(api, stream, subject, below + 1)

    patch.setattr(bus, "purge", faulty)


def edits_of_the_stream_not_seen(patch: pytest.MonkeyPatch) -> None:
    """What an operator gave the log that erases entries is not looked at."""
    patch.setattr(declare, "_PLAIN", {})
