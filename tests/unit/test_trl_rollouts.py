"""TRL's trainer as that of a run, as far as it goes without TRL: its settings, its callback, the learner's thread."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from fleetbus.config.settings import Configuration, NatsSettings, RunSettings
from fleetbus.errors import TakenOver, UserError
from fleetbus.tasks.files import load_tasks
from fleetbus_workers.trainers.handover import Handover
from fleetbus_workers.trainers.learner_thread import LearnerThread
from fleetbus_workers.trainers.rows import Row, build_filler
from fleetbus_workers.trainers.trl import TrlRollouts, build_callback, check_arguments, record_optimizer

ROWS = [
    Row(
        episode_id="e", group_id="g", ids=np.arange(2, dtype=np.int32), loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32), advantage=1.0,
    )
]  # fmt: skip
FILLER = build_filler(ROWS)
CONFIGURATION = Configuration(run=RunSettings(name="r1"), nats=NatsSettings(url="nats://127.0.0.1:1"))


def build_arguments(**changed: Any) -> SimpleNamespace:
    given = {
        "token_budget": 0, "weight_sync_steps": 1, "temperature": 1.0, "save_strategy": "no", "save_only_model": False,
        "save_total_limit": None, "learning_rate": 1e-4, "max_grad_norm": 1.0,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


def test_settings_that_go_with_the_run_are_taken() -> None:
    check_arguments(build_arguments(), CONFIGURATION)
    check_arguments(build_arguments(save_total_limit=CONFIGURATION.learner.keep_checkpoints + 1), CONFIGURATION)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token_budget": None}, "token_budget=0"),
        ({"weight_sync_steps": 2}, "weight_sync_steps=1"),
        ({"temperature": 0.7}, "the run samples at 1.0"),
        ({"save_strategy": "epoch"}, 'save_strategy="no"'),  # it would store the last one again, after its digests are taken
        ({"save_only_model": True}, "save_only_model=False"),
        ({"save_total_limit": 1}, "give more than learner.keep_checkpoints = 3"),
    ],
)
def test_settings_under_which_a_checkpoint_or_a_batch_would_be_lost_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_arguments(build_arguments(**changed), CONFIGURATION)


def test_the_run_records_the_bounds_that_its_updates_are_held_to() -> None:
    learner = record_optimizer(build_arguments(max_grad_norm=0.0), CONFIGURATION).learner
    assert (learner.learning_rate, learner.max_grad_norm) == (1e-4, CONFIGURATION.learner.max_grad_norm)


class OneProcess:
    """As much of accelerate's `Accelerator` as is used."""

    is_main_process = True
    device = "cpu"

    def __init__(self) -> None:
        self.barriers = 0

    def reduce(self, tensor: Any, reduction: str) -> Any:
        return tensor

    def wait_for_everyone(self) -> None:
        self.barriers += 1


@pytest.fixture
def handover() -> Handover:
    return Handover(rows_per_step=4, rows_ahead=2)


def build_state(step: int, max_steps: int = 100) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=max_steps)


def test_a_metric_that_was_nan_throughout_and_comes_as_none_does_not_end_training(handover: Handover) -> None:
    pytest.importorskip("transformers")
    callback = build_callback(handover, OneProcess())
    callback.on_log(None, None, None, logs={"loss": 0.5, "kl": None, "entropy": math.nan, "perf/step_s": 1.0})
    assert handover.metrics == pytest.approx({"loss": 0.5, "entropy": math.nan}, nan_ok=True)
    callback.on_log(None, None, None, logs={"train_loss": 0.5})  # what is said at the end of training
    assert handover.metrics["loss"] == 0.5


def test_a_step_of_fillers_alone_moves_no_weights_and_no_moments_of_the_optimizer() -> None:
    """With gradient accumulation 1 the fillers before a checkpoint are such a step, as are those of a batch without rows."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    handover = Handover(rows_per_step=1, rows_ahead=1)
    handover.give(ROWS, FILLER, is_last=False)
    handover.give([], FILLER, is_last=False)
    handover.give(ROWS, FILLER, is_last=False)
    callback, weight = build_callback(handover, OneProcess()), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    control, moved = SimpleNamespace(should_save=False, should_training_stop=False), []
    for step in range(3):
        before = weight.detach().clone()
        row = handover.take(0)
        (weight.sum() * row.advantage).backward()
        callback.on_pre_optimizer_step(None, build_state(step), control, model=None, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(None, build_state(step + 1), control)
        moved.append(not torch.equal(before, weight))
    assert moved == [True, False, True]
    assert optimizer.state[weight]["step"] == 2


def test_more_steps_than_the_trainer_was_given_are_an_error_and_no_quiet_end(handover: Handover) -> None:
    pytest.importorskip("transformers")
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    with pytest.raises(UserError, match=r"max_steps=3\) is reached before the run's last batch"):
        build_callback(handover, OneProcess()).on_step_end(None, build_state(step=3, max_steps=3), control)


def test_a_checkpoint_is_told_of_once_all_processes_have_written_theirs(handover: Handover, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    processes = OneProcess()
    callback = build_callback(handover, processes)
    callback.on_save(SimpleNamespace(output_dir=str(tmp_path)), build_state(step=1), None)
    assert processes.barriers == 1


class ScriptedThread(LearnerThread):
    """A learner that waits until it is cancelled, or ends at once: with ``error``, or as if finished."""

    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        super().__init__(CONFIGURATION)
        self._error, self._ends = error, ends
        self.is_running = threading.Event()
        self.was_cancelled = False

    async def _serve(self, trainer: Any, url: str) -> None:
        self.is_running.set()
        if self._error is not None:
            raise self._error
        try:
            if not self._ends:
                await anyio.sleep_forever()
        finally:
            self.was_cancelled = not self._ends

    def wait_ended(self) -> None:
        assert self._future is not None
        self._future.exception(5)


def start(learner: ScriptedThread) -> ScriptedThread:
    learner.start(None)  # type: ignore[arg-type]
    assert learner.is_running.wait(5)
    return learner


@pytest.mark.timeout(60)
def test_interrupted_while_it_waits_for_the_learner_the_trainer_ends_it() -> None:
    learner = start(ScriptedThread(ends=False))

    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    future, learner._future = learner._future, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        learner.finish()
    learner._future = future
    learner.cancel()
    assert learner.was_cancelled


def test_a_learner_that_does_not_run_is_an_error_for_who_waits_for_rows() -> None:
    learner = start(ScriptedThread())
    learner.finish()
    with pytest.raises(RuntimeError, match="finished, or was drained"):
        learner.check()
    learner.cancel()
    with pytest.raises(RuntimeError, match="does not run"):  # as in a second call of train()
        learner.check()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ExceptionGroup("tasks", [UserError("give it the checkpoint out/checkpoint-7")]), UserError, "checkpoint-7"),
        (ExceptionGroup("tasks", [TakenOver("by l2")]), RuntimeError, "another learner has taken over the run: by l2"),
        (ValueError("of its own"), RuntimeError, "its log says why"),
    ],
)
def test_who_waits_for_rows_is_told_in_one_line_why_none_come(error: Exception, kind: type[Exception], said: str) -> None:
    learner = start(ScriptedThread(error))
    learner.wait_ended()
    with pytest.raises(kind, match=said):
        learner.check()
    learner.cancel()


def test_a_list_of_tasks_is_taken_as_well_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rollouts = TrlRollouts(
        name="r1", folder=str(tmp_path / "runs"), tasks=[{"key": "a", "prompt": "p"}, {"key": "b", "prompt": "q"}]
    )
    file = rollouts.configuration.run.tasks
    assert [task.key for task in load_tasks(file)] == ["a", "b"]
    assert TrlRollouts(name="r1", folder=str(tmp_path / "runs"), tasks=file).configuration.run.tasks == file


def test_tasks_that_are_none_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the argument tasks"):
        TrlRollouts(name="r1", folder=str(tmp_path), tasks=[{"key": "a"}])
    with pytest.raises(UserError, match="the argument tasks"):
        TrlRollouts(name="r1", folder=str(tmp_path), tasks=5)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
