"""Bounds the episodes that are out at a time, by how full the engines' caches are. Pure: times are arguments.

Up step by step, down at once, as prime-rl does: an engine with a full cache computes again what it had to throw out, and more
episodes make it slower. Engines that do not tell how full they are, such as `torch`, leave the number as it is.
"""

from fleetbus_schemas import EngineLoad

ADJUST_SECONDS = 10.0
"""Between two changes: five heartbeats of every engine, so that the last change shows."""

LOST_SECONDS = 10.0
"""An engine that was not heard of for as long is not counted."""

MOST_ENGINES = 4096
"""Engines that are counted: those heard of last."""

FULL_CACHE = 0.9
ROOMY_CACHE = 0.6
CUT_BY_PREEMPTIONS = 0.8
CUT_BY_CACHE = 0.9
GROWTH = 1.25
BINDING_SHARE = 0.9
"""The number is raised only if as many are out that it holds others back."""


class EnginePressure:
    """Between ``least`` and ``most`` episodes; ``most`` to begin with. ``reason`` says why the number is what it is."""

    def __init__(self, *, least: int, most: int) -> None:
        self._least, self._most = float(least), float(max(least, most))
        self._limit = self._most
        self._heard: dict[str, tuple[float, EngineLoad]] = {}
        """By worker, in the order in which they were heard of."""
        self._preemptions: dict[str, int] = {}
        self._adjusted_at = 0.0
        self.reason = ""

    @property
    def limit(self) -> int:
        """Episodes that may be out now."""
        return int(self._limit)

    def record(self, worker: str, load: EngineLoad | None, now: float) -> None:
        """Record what an inference worker reports of its engine."""
        if load is None or load.kv_cache_use is None:
            return
        self._heard.pop(worker, None)
        self._heard[worker] = now, load
        if len(self._heard) > MOST_ENGINES:
            del self._heard[next(iter(self._heard))]

    def adjust(self, out: int, now: float) -> bool:
        """Set the number anew if it is time; ``out`` episodes are out. True if it changed."""
        if now - self._adjusted_at < ADJUST_SECONDS:
            return False
        self._adjusted_at = now
        self._heard = {worker: heard for worker, heard in self._heard.items() if now - heard[0] <= LOST_SECONDS}
        if not self._heard:
            return False
        preempted, use = self._count_preemptions(), max(load.kv_cache_use or 0.0 for _, load in self._heard.values())
        before = self.limit
        if preempted:
            self._cut(out, CUT_BY_PREEMPTIONS, f"{preempted} requests lost their place in a cache")
        elif use > FULL_CACHE:
            self._cut(out, CUT_BY_CACHE, f"a cache is {use:.0%} full")
        elif use < ROOMY_CACHE and out >= BINDING_SHARE * self._limit and self._limit < self._most:
            self._limit = min(self._limit * GROWTH, self._most)
            self.reason = f"caches are {use:.0%} full at most"
        return self.limit != before

    def _cut(self, out: int, share: float, reason: str) -> None:
        self._limit = max(min(self._limit, float(out)) * share, self._least)
        self.reason = reason

    def _count_preemptions(self) -> int:
        """Since the last time; an engine that began again counts from 0, one that is new from what it says first."""
        before, self._preemptions = self._preemptions, {name: load.preemptions or 0 for name, (_, load) in self._heard.items()}
        return sum(max(total - before.get(worker, total), 0) for worker, total in self._preemptions.items())
