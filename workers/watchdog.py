"""Says when nothing has progressed: where a run is stuck, and since when. Pure: a judgement on what the fold of a run shows.

Silent hangs are what users of such systems complain of most, so every wait that can hold a whole run has a name here. Progress
is an episode that ended or a step that was trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workers.monitor.follow import LogHealth
from workers.monitor.roster import WorkerRow
from workers.monitor.state import FleetState

STALL_SECONDS = 60.0
"""Without progress for this long something is said."""

ALIVE = ("working", "draining")


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a run stands. ``where`` is a role or ``log``; ``seconds`` how long it has been so."""

    where: str
    reason: str
    seconds: float
    advice: str

    @property
    def line(self) -> str:
        return f"stuck at the {self.where} for {self.seconds:.0f} s: {self.reason}; {self.advice}"


def find_stalls(
    state: FleetState,
    health: LogHealth,
    *,
    now: float,
    now_ns: int,
    admission: float = 0.7,
    stall_seconds: float = STALL_SECONDS,
) -> list[Stall]:
    """What holds the run, most telling first; nothing while it progresses, is over, or has not begun.

    ``now`` is monotonic seconds, ``now_ns`` the server's time; ``admission`` the share of the log that requests may fill.
    """
    if health.problem:
        return [
            Stall(where="log", reason=health.problem, seconds=0.0, advice="is nats-server running, and reachable from here?")
        ]
    numbers = state.numbers(now_ns)
    quiet = numbers["since_progress_seconds"]
    if quiet is None:
        quiet = numbers["oldest_open_seconds"]
    if state.finished or quiet < stall_seconds:
        return []
    workers = state.workers(now)
    found = [*_of_environments(workers, numbers, quiet), *_of_inference(state, workers, numbers, quiet)]
    return found or _of_learner(workers, health, numbers, quiet, admission)


def _of_environments(workers: Sequence[WorkerRow], numbers: dict[str, float], quiet: float) -> list[Stall]:
    alive = _alive(workers, "environment")
    waiting = int(numbers["waiting"])
    if waiting and not alive:
        reason = f"{waiting} episodes wait and no environment worker is alive{_last_words(workers, 'environment')}"
        return [Stall(where="environment", reason=reason, seconds=quiet, advice="start `fleetbus environment`")]
    full = alive and all(row.in_flight >= row.slots for row in alive)
    if waiting and full:
        reason = f"{waiting} episodes wait, all slots of {len(alive)} workers are taken and none of their episodes ends"
        return [Stall(where="environment", reason=reason, seconds=quiet, advice="look at the oldest with `fleetbus sessions`")]
    return []


def _of_inference(state: FleetState, workers: Sequence[WorkerRow], numbers: dict[str, float], quiet: float) -> list[Stall]:
    running = int(numbers["running"])
    if not running:
        return []
    alive = _alive(workers, "inference")
    if not alive:
        reason = f"{running} episodes run and no inference worker is alive{_last_words(workers, 'inference')}"
        return [Stall(where="inference", reason=reason, seconds=quiet, advice="start `fleetbus inference`")]
    behind = [row.worker for row in alive if row.policy_version < state.progress.version]
    if len(behind) == len(alive):
        reason = f"no inference worker has loaded version {state.progress.version} (they have {alive[0].policy_version})"
        return [Stall(where="inference", reason=reason, seconds=quiet, advice="see why in their logs; is --run-folder shared?")]
    busy = sum(row.in_flight for row in alive)
    reason = f"{running} episodes run, {busy} observations are being answered, and none ends"
    return [Stall(where="inference" if busy else "environment", reason=reason, seconds=quiet, advice="see `fleetbus sessions`")]


def _of_learner(
    workers: Sequence[WorkerRow], health: LogHealth, numbers: dict[str, float], quiet: float, admission: float
) -> list[Stall]:
    if health.limit_bytes and health.bytes >= admission * health.limit_bytes:
        share = health.bytes / health.limit_bytes
        reason = f"it is {share:.0%} full, so that new requests wait"
        return [
            Stall(where="log", reason=reason, seconds=quiet, advice="run `fleetbus recorder --archive DIR`, or raise max_bytes")
        ]
    if not _alive(workers, "learner"):
        reason = f"no learner is alive{_last_words(workers, 'learner')}"
        return [
            Stall(
                where="learner", reason=reason, seconds=quiet, advice="start `fleetbus learner`, it goes on from its checkpoint"
            )
        ]
    reason = "nothing waits and nothing runs: it trains, publishes or stores a checkpoint"
    return [Stall(where="learner", reason=reason, seconds=quiet, advice="see its log")]


def _alive(workers: Sequence[WorkerRow], role: str) -> list[WorkerRow]:
    return [row for row in workers if row.role == role and row.state in ALIVE]


def _last_words(workers: Sequence[WorkerRow], role: str) -> str:
    gone = [row for row in workers if row.role == role]
    if not gone:
        return ""
    last = min(gone, key=lambda row: row.seconds)
    note = f": {last.note}" if last.note else ""
    return f" ({last.worker} is {last.state} for {last.seconds:.0f} s{note})"
