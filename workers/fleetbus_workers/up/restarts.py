"""Decides when a worker that ended may start again: back-off that doubles, and a bound after which the run has failed. Pure."""

from collections import deque

CRASHES_ALLOWED = 5
"""The fifth crash of one worker within `WINDOW_SECONDS` fails the run."""

WINDOW_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 5.0
REFUSED_PATIENCE_SECONDS = 600.0
"""A worker that has worked and cannot begin again, as while the server is away, is tried for so long."""


class RestartBudget:
    """The crashes of one worker, by a clock that the caller reads."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque()
        self._refused_since: float | None = None

    def delay_after_crash(self, now_seconds: float) -> float | None:
        """Seconds to wait before the next start, or None when there have been too many."""
        self._refused_since = None
        while self._crashes and self._crashes[0] <= now_seconds - WINDOW_SECONDS:
            self._crashes.popleft()
        self._crashes.append(now_seconds)
        if len(self._crashes) >= CRASHES_ALLOWED:
            return None
        return float(min(FIRST_DELAY_SECONDS * 2 ** (len(self._crashes) - 1), LONGEST_DELAY_SECONDS))

    def delay_after_refusal(self, now_seconds: float, *, has_worked: bool) -> float | None:
        """The same for a worker that refuses to start: None if it never worked or has refused for too long."""
        if self._refused_since is None:
            self._refused_since = now_seconds
        if not has_worked or now_seconds - self._refused_since > REFUSED_PATIENCE_SECONDS:
            return None
        return LONGEST_DELAY_SECONDS
