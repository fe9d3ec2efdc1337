"""Failures in one of several processes that share a model: the others go on in step, or all of them end at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.trainable_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[1] / "support/sharded_faults.py"
LIMIT_SECONDS = 240
"""A process that nothing ends would wait for days."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), spread=0.0)


def run(folder: Path, out: Path, fault: str) -> tuple[int, list[str], str]:
    """The launcher's exit status, what the leader saw, and what was said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "3600"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(folder), str(out), fault],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    told = out / "told"
    return done.returncode, told.read_text().splitlines() if told.exists() else [], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "follower cannot write its shards",
            "train: done, checkpoint: OSError, train: done, checkpoint: done, model: done, model: done, weights: done, closed",
        ),
        (
            "leader cannot write the model",
            "train: done, checkpoint: done, train: done, checkpoint: done, model: OSError, model: done, weights: done, closed",
        ),
    ],
)
def test_a_full_disk_costs_what_was_written_and_no_process(folder: Path, tmp_path: Path, fault: str, expected: str) -> None:
    (folder / "tokenizer.json").write_text("{}")  # something to copy beside the weights

    status, told, said = run(folder, tmp_path, fault)

    assert (status, ", ".join(told)) == (0, expected), said[-4000:]
    assert load_file(tmp_path / "weights").keys() == load_file(tmp_path / "model/model.safetensors").keys()


def test_a_step_that_fails_in_the_leader_alone_ends_all_processes(folder: Path, tmp_path: Path) -> None:
    status, told, said = run(folder, tmp_path, "leader fails in a step")

    assert status != 0 and told == ["train: RuntimeError"]
    assert "out of memory" in said, "the reason is not lost"


def test_a_checkpoint_that_one_process_cannot_read_is_an_error_of_the_disk(folder: Path, tmp_path: Path) -> None:
    status, told, _ = run(folder, tmp_path, "follower cannot read its shards")

    assert status != 0 and "restore: OSError" in told


def test_a_killed_process_ends_a_leader_that_waits_for_nothing_of_it(folder: Path, tmp_path: Path) -> None:
    status, _, said = run(folder, tmp_path, "follower is killed")

    assert status != 0
    assert "process of the shared model is gone" in said
