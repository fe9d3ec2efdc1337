"""Whether the log has room for more work: what is stored now, and what the work that was admitted will still store.

An episode's share of the log is measured, not set: by how much the log grew while how many episodes ended. The measure is low
where entries were removed meanwhile, and zero until the first episode has ended.
"""

from __future__ import annotations

FILL_SHARE = 0.9
"""Share of the log that admitted work may be expected to fill; the rest is for what must be stored to remove anything."""

MEASURED_EPISODES = 512
"""Older ones count ever less: episodes grow while a policy learns."""


class LogRoom:
    """``admission`` is the share of the log above which no work is admitted, whatever is still on its way."""

    def __init__(self, admission: float) -> None:
        self._admission = admission
        self._used: int | None = None
        self._ended = 0
        self._measured_bytes = 0.0
        self._measured_episodes = 0.0

    @property
    def bytes_per_episode(self) -> float:
        """0 while nothing was measured."""
        return self._measured_bytes / self._measured_episodes if self._measured_episodes else 0.0

    def record_end(self) -> None:
        """An episode has its result."""
        self._ended += 1

    def is_short(self, used: int, limit: int, *, admitted: int, wanted: int = 0) -> bool:
        """Whether ``wanted`` more episodes have to wait, with ``used`` of ``limit`` bytes stored (0: no limit) and ``admitted``
        episodes without a result. Without any of those the estimate says nothing: one group has to fit, or nothing ever would.
        """
        self._measure(used)
        if not limit:
            return False
        expected = (admitted + wanted) * self.bytes_per_episode if admitted else 0.0
        return used >= limit * self._admission or used + expected >= limit * FILL_SHARE

    def _measure(self, used: int) -> None:
        before, self._used = self._used, used
        if before is not None and used > before and self._ended:
            if self._measured_episodes > MEASURED_EPISODES:
                self._measured_bytes, self._measured_episodes = self._measured_bytes / 2, self._measured_episodes / 2
            self._measured_bytes += used - before
            self._measured_episodes += self._ended
        if before is None or used != before:
            self._ended = 0
