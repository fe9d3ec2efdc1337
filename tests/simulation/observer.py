"""Notes of the simulation while it runs: violations, the trace and its hash, and every disturbance it caused.

The checks above report here; a disturbance is what excuses an outcome that a calm fleet must never have.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import anyio
import msgspec

MAX_VIOLATIONS = 20

ALL_WORKERS = "*"

GARBAGE = b"\xc1"
"""An entry that is no message: a byte that MessagePack never uses."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A broken invariant: which one, at what virtual second, and what was seen."""

    invariant: str
    at: float
    detail: str


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that touched one worker, or all, from ``start`` to ``stop`` (seconds)."""

    kind: str
    worker: str
    start: float
    stop: float


class Observer:
    """``violated`` is set by the first violation. ``lines`` are kept only if asked for: the hash needs none."""

    def __init__(self, *, keep_lines: bool = False) -> None:
        self.violations: list[Violation] = []
        self.violated = anyio.Event()
        self.judged: frozenset[str] | None = None
        """The invariants that still hold, None for all of them."""
        self.has_healed = False
        """From now on nothing more is caused."""
        self.lines: list[str] | None = [] if keep_lines else None
        self.disturbances: list[Disturbance] = []
        self._reads_until: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """By worker, and by the last token of what it asked for, when a read that was lost ends."""
        self._message_faults: defaultdict[str, list[tuple[float, str, str]]] = defaultdict(list)
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()

    def trace(self, kind: str, *words: object, payload: bytes = b"") -> None:
        """One event; its order, its virtual time and all its words enter the hash."""
        line = f"{anyio.current_time():.6f} {kind} {' '.join(map(str, words))}"
        self._digest.update(line.encode())
        self._digest.update(payload)
        if self.lines is not None:
            self.lines.append(line)

    def violate(self, invariant: str, detail: str) -> None:
        if self.judged is not None and invariant not in self.judged:
            return
        at = anyio.current_time()
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(invariant=invariant, at=round(at, 3), detail=detail))
        self.trace("VIOLATION", invariant, detail)
        self.violated.set()

    def require(self, holds: bool, invariant: str, detail: str) -> None:
        if not holds:
            self.violate(invariant, detail)

    def disturb(self, kind: str, worker: str = ALL_WORKERS, *, seconds: float = 0.0) -> None:
        now = anyio.current_time()
        self.disturbances.append(Disturbance(kind=kind, worker=worker, start=now, stop=now + seconds))
        self.trace("disturb", kind, worker, seconds)

    def disturb_message(self, kind: str, subject: str) -> None:
        """A fault of one message."""
        words = subject.split(".")
        self._message_faults[words[-1]].append((anyio.current_time(), kind, words[2]))
        self.trace("disturb", kind, subject)

    def lose_read(self, worker: str, subjects: Sequence[str], *, seconds: float) -> None:
        """A worker waits in vain for an answer."""
        for subject in subjects:
            self._reads_until[worker][subject.rpartition(".")[2]] = anyio.current_time() + seconds

    def reads_until(self, worker: str, *names: str) -> float:
        """When the worker's last read that was lost ends, of anything or of what is named so; 0 if there was none."""
        return max((until for name, until in self._reads_until[worker].items() if not names or name in names), default=0.0)

    def was_disturbed(self, worker: str, *, since: float) -> bool:
        """True if something touched this worker, or all, at or after ``since``."""
        return any(each.stop >= since and each.worker in (worker, ALL_WORKERS) for each in self.disturbances)

    def disturbed_until(self, worker: str) -> float:
        """When the last disturbance of this worker, or of all, ended; 0 if there was none."""
        return max((each.stop for each in self.disturbances if each.worker in (worker, ALL_WORKERS)), default=0.0)

    @property
    def last_disturbed(self) -> float:
        """When the last disturbance ended; 0 if there was none."""
        return max((each.stop for each in self.disturbances), default=0.0)

    def message_fault_count(self, since: float, *, kind: str = "") -> int:
        """Faults of messages of anything at or after ``since``."""
        return sum(at >= since and kind in ("", each) for faults in self._message_faults.values() for at, each, _ in faults)

    def message_faults(self, episode: str, *, since: float = 0.0, kind: str = "", subject: str = "") -> int:
        """Faults of messages of an episode; ``subject`` is the kind of subject: task, obs, act, episode."""
        return sum(
            at >= since and kind in ("", each) and subject in ("", where) for at, each, where in self._message_faults[episode]
        )
