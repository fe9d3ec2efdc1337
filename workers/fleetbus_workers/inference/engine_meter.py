"""Measures the engine for heartbeats: its load by its own count, and rates over the seconds between two heartbeats."""

from collections.abc import Mapping

import msgspec

from fleetbus_schemas import EngineLoad
from fleetbus_workers.inference.base import Sampler

LEAST_SECONDS = 1.0
"""Of a window: a heartbeat that follows sooner repeats the rates of the one before."""


class EngineMeter:
    """Measures one sampler. ``now`` of each call are seconds of a clock that only goes forward."""

    def __init__(self, sampler: Sampler, now: float) -> None:
        self._sampler = sampler
        self._at = now
        self._counted = self.read_counters()
        self._rates: dict[str, float] = {}

    def read_counters(self) -> Mapping[str, float]:
        """Read the counters of the engine; empty if it has none."""
        stats: Mapping[str, float] = getattr(self._sampler, "stats", {})
        return stats

    def measure(self, now: float) -> EngineLoad | None:
        """None if the engine reports nothing."""
        counted = self.read_counters()
        load: EngineLoad | None = getattr(self._sampler, "engine_load", None)
        if load is None and "sampled_tokens" not in counted:
            return None
        if now - self._at >= LEAST_SECONDS:
            self._update_rates(counted, now)
        return msgspec.structs.replace(load or EngineLoad(), **self._rates)

    def _update_rates(self, counted: Mapping[str, float], now: float) -> None:
        grown = {name: value - self._counted.get(name, 0.0) for name, value in counted.items()}
        self._rates["tokens_per_second"] = grown.get("sampled_tokens", 0.0) / (now - self._at)
        cached = grown.get("cached_tokens", 0.0)
        if (prompts := cached + grown.get("prefill_tokens", 0.0)) > 0:
            self._rates["prefix_hits"] = cached / prompts
        self._counted, self._at = counted, now
