"""How busy a server is, read from the Prometheus text that vLLM serves under ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fleetbus_schemas import EngineLoad

MAX_CHARS = 4 << 20
MAX_COUNT = 1 << 53
"""Of anything: a server that says more, in one line or in many, cannot make a heartbeat that no encoder takes."""

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_use",
    "vllm:num_preemptions_total": "preemptions",
}


def parse_load(text: str) -> EngineLoad:
    """What the text says, None where it says nothing; values that cannot be are left out."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for line in text[:MAX_CHARS].splitlines():
        if (name := _NAMES.get(line.partition("{")[0].partition(" ")[0])) is not None:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            if 0 <= value <= MAX_COUNT:
                found[name].append(value)
    return merge_loads(
        EngineLoad(**{name: value if name == "kv_cache_use" else int(value)})  # type: ignore[arg-type]
        for name, values in found.items()
        for value in values
    )


def merge_loads(loads: Iterable[EngineLoad]) -> EngineLoad:
    """Several engines as one: requests added, of the use of the cache the largest."""
    running = waiting = preemptions = None
    use: float | None = None
    for load in loads:
        running, waiting = _add(running, load.running), _add(waiting, load.waiting)
        preemptions = _add(preemptions, load.preemptions)
        use = max((each for each in (use, load.kv_cache_use) if each is not None), default=None)
    return EngineLoad(running=running, waiting=waiting, kv_cache_use=use, preemptions=preemptions)


def _add(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left + right, MAX_COUNT)
