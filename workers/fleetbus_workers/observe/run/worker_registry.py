"""Registry of workers: a fold of heartbeats and of the log's life entries. Pure: time is an argument.

A worker that falls silent stays in the table for a while, because users look for dead workers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS
from fleetbus_schemas import (
    EngineLoad,
    Heartbeat,
    Message,
    SlotShare,
    WorkerDraining,
    WorkerFailed,
    WorkerRole,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_workers.observe.run.recent_workers import RecentWorkers

RETENTION_SECONDS = 600.0
"""Silent, stopped and failed workers are shown for this long."""

NOTE_CHARACTERS = 600
"""Of what a worker failed of: it cuts the text itself, and somebody else with its key may not."""

State = Literal["working", "draining", "starting", "silent", "stopped", "failed"]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the table shows it. ``seconds`` since its last sign of life; ``note`` is what it failed of, or what keeps
    it from its work; ``version`` and ``protocol`` are those of its program."""

    worker: str
    role: WorkerRole
    state: State
    slots: int
    in_flight: int
    policy_version: int
    lane: str
    seconds: float
    note: str
    engine: EngineLoad | None = None
    pools: tuple[str, ...] = ()
    version: str = ""
    protocol: int = 0
    share: SlotShare | None = None
    policy: str = ""


class _WorkerRecord(msgspec.Struct, kw_only=True):
    role: WorkerRole
    at: float
    beat: Heartbeat | None = None
    ended: Literal["stopped", "failed"] | None = None
    draining: bool = False
    note: str = ""


def merge_heartbeat(last: Heartbeat | None, beat: Heartbeat) -> Heartbeat:
    """``beat`` with what the ``last`` one of the worker said, if it comes from the thread that watches a blocked loop: that
    knows of the problem alone."""
    if last is None or not beat.problem or beat.counters or beat.lane:
        return beat
    return msgspec.structs.replace(last, problem=beat.problem)


class WorkerRegistry:
    """Times are monotonic seconds of the caller. Life entries of long ago count only where a heartbeat follows them.

    Workers are told apart by role and name: who may speak for one role says nothing of another one's workers.
    """

    def __init__(self) -> None:
        self._records: RecentWorkers[_WorkerRecord] = RecentWorkers()

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        seen = self._records.get(beat.role, beat.worker)
        if seen is None or seen.ended:
            seen = _WorkerRecord(role=beat.role, at=now)
        self._records.put(beat.role, beat.worker, seen)
        seen.beat = merge_heartbeat(seen.beat, beat)
        seen.at, seen.draining = now, seen.beat.draining

    def record_life_event(self, message: Message, age_seconds: float, now: float) -> None:
        """Take in a life entry that was stored ``age_seconds`` ago."""
        if (
            not isinstance(message, (WorkerStarted, WorkerDraining, WorkerStopped, WorkerFailed))
            or age_seconds > RETENTION_SECONDS
        ):
            return
        at = now - max(age_seconds, 0.0)
        seen = self._records.get(message.role, message.worker)
        if seen is None or isinstance(message, WorkerStarted):
            seen = _WorkerRecord(role=message.role, at=at)
        self._records.put(message.role, message.worker, seen)
        seen.at = max(seen.at, at)
        match message:
            case WorkerDraining():
                seen.draining = True
            case WorkerStopped():
                seen.ended = "stopped"
            case WorkerFailed():
                seen.ended, seen.note = "failed", f"{message.error_class}: {message.error}"[:NOTE_CHARACTERS]

    def take_over(self, other: WorkerRegistry) -> None:
        """Take in what another registry of the same workers knows: of each worker the newer of both records."""
        for role, worker, seen in other._records.list_all():
            known = self._records.get(role, worker)
            if known is None or seen.at > known.at:
                self._records.put(role, worker, seen)
            elif known.beat is None:
                known.beat = seen.beat

    def list_heartbeats(self) -> list[Heartbeat]:
        """The newest heartbeat of every worker that has not ended, by role and name."""
        beats = [seen.beat for _, _, seen in self._records.list_all() if seen.beat is not None and not seen.ended]
        return sorted(beats, key=lambda beat: (beat.role, beat.worker))

    @property
    def is_paused(self) -> bool:
        """True if the learner was asked to request no new groups."""
        return any(beat.paused and beat.role == "learner" for beat in self.list_heartbeats())

    def list_live(self, now: float) -> list[Heartbeat]:
        """The newest heartbeat of every worker that is neither silent nor at its end, by role and name."""
        heard = [seen for _, _, seen in self._records.list_all() if not seen.ended and now - seen.at <= SILENT_AFTER_SECONDS]
        return sorted((seen.beat for seen in heard if seen.beat is not None), key=lambda beat: (beat.role, beat.worker))

    def rows(self, now: float) -> list[WorkerRow]:
        """The workers of now and of late, by role and name; the others are forgotten."""
        for role, worker, seen in self._records.list_all():
            if now - seen.at > RETENTION_SECONDS:
                self._records.remove(role, worker)
        rows = [_build_row(worker, seen, now) for _, worker, seen in self._records.list_all()]
        return sorted(rows, key=lambda row: (row.role, row.worker))


def _build_row(name: str, seen: _WorkerRecord, now: float) -> WorkerRow:
    beat = seen.beat
    return WorkerRow(
        worker=name,
        role=seen.role,
        state=_compute_state(seen, now - seen.at),
        slots=beat.slots if beat else 0,
        in_flight=beat.in_flight if beat and not seen.ended else 0,
        policy_version=beat.policy_version if beat else -1,
        lane=beat.lane if beat else "",
        seconds=round(now - seen.at, 1),
        note=seen.note or (beat.problem if beat and not seen.ended else ""),
        engine=beat.engine if beat and not seen.ended else None,
        pools=beat.pools if beat else (),
        version=beat.version if beat else "",
        protocol=beat.protocol if beat else 0,
        share=beat.share if beat else None,
        policy=beat.policy if beat else "",
    )


def _compute_state(seen: _WorkerRecord, silence: float) -> State:
    if seen.ended:
        return seen.ended
    if silence > SILENT_AFTER_SECONDS:
        return "stopped" if seen.role == "gateway" and seen.draining else "silent"
    if seen.beat is None:
        return "starting"
    return "draining" if seen.draining else "working"
