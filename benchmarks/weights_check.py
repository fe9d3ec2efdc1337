"""The check of a weights file's numbers by an engine, digest and finiteness: before decision 0228 and since.

    python benchmarks/weights_check.py --json

``separate`` is `hashlib.sha256` of the whole tensor and then `torch.isfinite`, as it was; ``one_pass`` is
`fleetbus_workers.weights.content`; ``finite_...`` are the second halves alone, and ``digest`` the first. One thread each, GB/s,
the best of some rounds that take turns; ``ratio`` is ``one_pass`` to ``separate``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from fleetbus_workers.weights.content import ContentCheck, check_content
from fleetbus_workers.weights.file import view_bytes

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WithoutDigest(ContentCheck):
    """Finiteness alone."""

    class _Nothing:
        def update(self, content: object) -> None:
            """Take it."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self._digest = self._Nothing()  # type: ignore[assignment]


def measure(name: str, megabytes: int, rounds: int) -> dict[str, object]:
    """One row: GB/s of each way on random numbers of one type."""
    tensor = torch.randn(megabytes * 1_000_000 // TYPES[name].itemsize).to(TYPES[name])
    content = view_bytes(tensor)

    def separate() -> None:
        hashlib.sha256(content).hexdigest()
        assert bool(tensor.isfinite().all())

    ways: dict[str, Callable[[], object]] = {
        "separate": separate,
        "one_pass": lambda: check_content(name, content).sha256,
        "digest": lambda: hashlib.sha256(content).hexdigest(),
        "finite_separate": lambda: bool(tensor.isfinite().all()),
        "finite_one_pass": lambda: WithoutDigest(name).update(content),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, call in ways.items():
            started = time.perf_counter()
            call()
            best[way] = min(best[way], time.perf_counter() - started)
    rates = {way: round(len(content) / seconds / 1e9, 2) for way, seconds in best.items()}
    return {"dtype": name, **rates, "ratio": round(best["separate"] / best["one_pass"], 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in TYPES:
        row = measure(kind, options.megabytes, options.rounds)
        print(json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
