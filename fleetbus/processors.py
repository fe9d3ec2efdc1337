"""The processors of this machine that a process may use."""

import os


def count_processors() -> int:
    """At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
