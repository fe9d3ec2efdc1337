"""The common beginning of two sequences of token ids, which an engine keeps and the trainer runs once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_prefix_length(left: NDArray[Any], right: NDArray[Any]) -> int:
    """Number of ids at the beginning that are the same."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if different.size else shorter
