"""The progress of a lineage: the one thing that admission, steps, evaluations and heartbeats all read. The steps write it."""

from collections import defaultdict

import msgspec


class Progress(msgspec.Struct, kw_only=True):
    """``step`` is the last one that was trained, ``counters`` are what the heartbeat tells beside it."""

    lineage: str
    step: int
    counters: defaultdict[str, float] = msgspec.field(default_factory=lambda: defaultdict(float))
