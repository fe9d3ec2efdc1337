"""The processors of this machine that a process may use."""

import functools
import os
import re
from pathlib import Path

_BFLOAT16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""Instructions by their names in /proc/cpuinfo, on x86 and on ARM."""


def count_processors() -> int:
    """At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if the processors have instructions for it; False, too, where that cannot be read. Others convert it back and forth,
    and are faster in float32."""
    try:
        return bool(_BFLOAT16.search(Path("/proc/cpuinfo").read_text().partition("\n\n")[0]))
    except OSError:
        return False
