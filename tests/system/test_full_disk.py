"""A learner whose disk is full waits for room, at whatever it writes, and has lost nothing when there is some."""

from __future__ import annotations

import errno
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus_schemas import Task, TensorEntry
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.learner.checkpoints import Checkpoint, write_checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.file import write_weights
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

GUESSING = Path(__file__).parents[1] / "replay" / "recordings" / "guessing.fbrec"
TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]

anyio_backend = virtual_time


class TwiceFull(ScriptedTrainer):
    """Whatever is written fails twice, and then fits."""

    def __init__(self) -> None:
        super().__init__()
        self.tries: Counter[str] = Counter()

    def _write(self, what: str) -> None:
        self.tries[what] += 1
        if self.tries[what] % 3:
            raise OSError(errno.ENOSPC, "No space left on device", what)

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        self._write(f"weights {file.parent.name}")
        return super().save_weights(file)

    def save_state(self, file: Path) -> None:
        self._write("state")
        super().save_state(file)


async def test_a_full_disk_delays_training_and_loses_nothing(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=4, groups=2, group_size=2, checkpoint_every=2, max_staleness=1),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = TwiceFull()
    with anyio.fail_after(3000):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            await learner.ended.wait()
            assert learner.error is None
            report = await audit_run(fleet.bus, fleet.subjects)
    assert report.balanced, report.findings
    assert trainer.updates == 4
    assert trainer.tries["state"] == 6, "two checkpoints, each at the third try"
    assert trainer.tries["weights weights"] == 15, "five versions, each at the third try"
    assert not half_written(tmp_path)


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".part")]


class Opaque(ScriptedTrainer):
    """As torch.save on a full disk: an error that does not say why."""

    def save_state(self, file: Path) -> None:
        raise RuntimeError("unexpected pos 576 vs 534")


@pytest.mark.parametrize(("free_bytes", "expected"), [(0, OSError), (1 << 30, RuntimeError)])
def test_an_error_that_does_not_say_so_counts_as_a_full_disk_only_if_it_is_full(
    free_bytes: int, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free_bytes))
    checkpoint = Checkpoint(lineage="l1", step=1, version=1, floor=1, settled=(), next_group=0)
    with pytest.raises(expected) as raised:
        write_checkpoint(tmp_path, checkpoint, Opaque())
    assert getattr(raised.value, "errno", None) == (errno.ENOSPC if expected is OSError else None)
    assert not list(tmp_path.iterdir())


def test_weights_that_do_not_fit_raise_an_error_of_the_disk(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError) as raised:
            write_weights(tmp_path / "weights", {"a": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [("episodes", "--format", "atif", "--output", "e.jsonl"), ("record", "-o", "x.fbrec")],
    ids=["episodes", "record"],
)
def test_a_file_that_does_not_fit_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *options = arguments
    opened = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode not in ("wb", "xb"):
            return opened(path, mode, **options)
        path.touch()
        return opened(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    assert run_program([command, str(GUESSING), *options]) != 0
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
