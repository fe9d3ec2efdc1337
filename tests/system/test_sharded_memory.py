"""No process ever holds the whole of a model that several share: measured, with limits below what the whole would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory_plan
from fleetbus_workers.up.memory import MASTER_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROCESSES = 4
DEEP = {"hidden_size": 384, "num_hidden_layers": 20, "intermediate_size": 1152, "vocab_size": 1024}
"""Many layers and a small vocabulary: what is gathered of a model for one pass is little beside the whole."""

ROOM = 1.2


def test_loading_publishing_and_checkpoints_hold_shards_and_never_the_whole(tmp_path: Path) -> None:
    """A process that loads the model before it is sharded, gathers all weights to publish them, or builds the whole
    checkpoint in its memory, holds more than the limit."""
    warm = memory_plan.make_model(tmp_path / "warm", {**memory_plan.SIZES["tiny"], "num_hidden_layers": 2, "vocab_size": 64})
    folder = memory_plan.make_model(tmp_path / "model", DEEP)

    result = memory_plan.compare(folder, PROCESSES, memory_plan.measure(warm, folder, tmp_path / "out", PROCESSES))

    print(memory_plan.format_row(result | {"size": "deep"}))
    whole = result["parameters"] * MASTER_BYTES / 1e6
    limits = {name: ROOM * result["holds_mb"][name] for name in ("load", "publish", "checkpoint")}
    shard = whole / PROCESSES
    assert limits["load"] < whole and limits["publish"] < 3 * shard + whole and limits["checkpoint"] < 3 * shard + 3 * whole
    for name, limit in limits.items():
        assert result["measured_mb"][name] <= limit, name
    assert result["ratio"]["step"] == pytest.approx(1.0, abs=0.15)
