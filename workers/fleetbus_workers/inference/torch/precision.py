"""Tells processors and GPUs that multiply in bfloat16: on others it is slower than float32, because it is converted back and
forth."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

INSTRUCTIONS = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""By their names in /proc/cpuinfo, on x86 and on ARM."""


@functools.cache
def computes_bfloat16(device: str = "cpu") -> bool:
    """True if the device has instructions for it; False, too, where that cannot be read."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        return bool(INSTRUCTIONS.search(Path("/proc/cpuinfo").read_text().partition("\n\n")[0]))
    except OSError:
        return False
