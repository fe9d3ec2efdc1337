"""Lanes: a worker claims a free one of its role by compare-and-set and renews it (docs/concepts/lane.md).

A lane whose lease ran out is free. A worker that finds its lane taken has been replaced and stops.
"""

import math
import random
from collections.abc import Sequence

import anyio
import msgspec

from fleetbus.bus.base import LogBus
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS, LOST_AFTER_SECONDS
from fleetbus.errors import BusError, FleetbusError, PublishUnanswered, SequenceConflict
from fleetbus_schemas import LaneLease, MalformedMessage, Subjects, decode, encode

LEASE_SECONDS = LOST_AFTER_SECONDS
MAX_LEASE_SECONDS = 6 * LEASE_SECONDS
"""A bound on every entry: one that is wrong must not hold a lane for ever."""

ANSWER_SECONDS = 2.0
"""How long a renewal waits for the server: heartbeats wait with it."""

RENEWED_SECONDS = HEARTBEAT_SECONDS + ANSWER_SECONDS
"""A worker that lives has renewed its lease by then: one that ran out may have done so because the server's clock was set."""

MAX_LANES_IN_ORDER = 64


class LaneLost(FleetbusError):
    """Another worker holds this worker's lane: it was taken for dead and replaced."""


class NoLaneFree(FleetbusError):
    """Every declared lane of the role is held by a living worker."""


class LanesUnread(FleetbusError):
    """The server did not say in time which lanes are free."""


class Lane(msgspec.Struct, kw_only=True):
    """A lane that this worker holds. ``sequence`` is the last renewal."""

    name: str
    subject: str
    lease: LaneLease
    sequence: int

    async def renew(self, bus: LogBus) -> None:
        """Extend the lease; raises `LaneLost` when another worker holds it, or the log lost what was renewed; returns without
        error while the bus does not answer."""
        try:
            published = await bus.publish(self.subject, encode(self.lease), expected_last=self.sequence, timeout=ANSWER_SECONDS)
            self.sequence = published.sequence
        except SequenceConflict as conflict:
            if conflict.last is not None and conflict.last < self.sequence:
                raise LaneLost(
                    f"the log lost this worker's last renewals of lane {self.name}: it went back in time, and what this worker "
                    "knows of it may not be there any more; start it again"
                ) from conflict
            await self._confirm(bus, conflict)
        except BusError:
            return

    async def _confirm(self, bus: LogBus, conflict: SequenceConflict) -> None:
        """A conflict may be one's own unanswered renewal; without an answer the next renewal asks again."""
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                stored = await bus.last(self.subject)
        except (TimeoutError, BusError):
            return
        if stored is None or stored.payload != encode(self.lease):
            raise LaneLost(f"lane {self.name} is held by another worker") from conflict
        self.sequence = stored.sequence

    async def release(self, bus: LogBus) -> None:
        """Make the lane free at once; harmless when it is lost already."""
        free = LaneLease(worker="", nonce="", lease_seconds=0)
        try:
            await bus.publish(self.subject, encode(free), expected_last=self.sequence, timeout=ANSWER_SECONDS)
        except BusError:
            return


def _read_held_seconds(payload: bytes, subject: str) -> float:
    """For how long after it was stored an entry holds its lane."""
    try:
        lease = decode(LaneLease, payload, subject=subject)
    except MalformedMessage:
        return 0.0
    return min(lease.lease_seconds, MAX_LEASE_SECONDS) if lease.worker and lease.lease_seconds > 0 else 0.0  # none if NaN


async def claim_lane(
    bus: LogBus, subjects: Subjects, *, role: str, names: Sequence[str], worker: str, nonce: str, wait_seconds: float = 30.0
) -> Lane:
    """A free lane of ``names``; waits up to ``wait_seconds`` for one, then raises `NoLaneFree`, or `LanesUnread`.

    Of few lanes it is the first. Through many of them each worker looks in an order of its own, which its nonce gives: of W
    workers that start at the same moment each meets a few held lanes, and not W / 2.
    """
    if len(names) > MAX_LANES_IN_ORDER:
        names = random.Random(nonce).sample(names, len(names))
    lease = LaneLease(worker=worker, nonce=nonce, lease_seconds=LEASE_SECONDS)
    seen: dict[int, float] = {}
    asked_at, seen_at = math.inf, -math.inf
    with anyio.move_on_after(wait_seconds):
        while True:
            for name in names:
                asked_at = anyio.current_time()
                lane = await _try_claim(bus, subjects.lane(role, name), name, lease, seen)
                if lane is not None:
                    return lane
            asked_at, seen_at = math.inf, anyio.current_time()
            await anyio.sleep(1.0)
    ended_at = anyio.current_time()
    if ended_at - asked_at > ANSWER_SECONDS or ended_at - seen_at > LEASE_SECONDS:  # who held them then may be gone
        raise LanesUnread(f"the server did not say within {wait_seconds:g} s which {role} lanes are free; start this again")
    raise NoLaneFree(f"all {len(names)} {role} lanes are held: raise nats.lanes, or stop a worker")


async def _try_claim(bus: LogBus, subject: str, name: str, lease: LaneLease, seen: dict[int, float]) -> Lane | None:
    """``seen`` has since when an entry was seen to be the last: one from before the server's clock was set back has no age, and
    one from before it was set forward too much of it."""
    stored = await bus.last(subject)
    if stored is not None and stored.payload == encode(lease):  # one's own try, whose answer was lost
        return Lane(name=name, subject=subject, lease=lease, sequence=stored.sequence)
    if stored is not None:
        held_seconds, watched_at = _read_held_seconds(stored.payload, subject), anyio.current_time()
        watched_seconds = watched_at - seen.setdefault(stored.sequence, watched_at)
        age_seconds = (bus.now_ns() - stored.time_ns) / 1e9 if watched_seconds >= RENEWED_SECONDS else 0.0
        if held_seconds and max(age_seconds, watched_seconds) <= held_seconds:
            return None
    try:
        published = await bus.publish(subject, encode(lease), expected_last=stored.sequence if stored else 0, timeout=5.0)
    except (SequenceConflict, PublishUnanswered):
        return None
    return Lane(name=name, subject=subject, lease=lease, sequence=published.sequence)
