"""TRL's ``AsyncGRPOTrainer`` as the trainer of a run (trl 1.16): its rollouts are the run's, its weights the run's versions.

    rollouts = TrlRollouts(name="r1", steps=200)
    trainer = AsyncGRPOTrainer(
        model=folder,
        args=AsyncGRPOConfig("out", max_steps=10_000, token_budget=0, save_strategy="no"),
        train_dataset=rollouts.dataset,
        rollout_worker=rollouts,
        weight_transfer=rollouts.weight_transfer,
    )
    rollouts.attach(trainer)
    trainer.train(resume_from_checkpoint=rollouts.find_checkpoint())

Tasks, group sizes, limits, rewards and advantages are the run's settings; loss, optimizer and schedule are TRL's. Nothing of
TRL or torch is imported here before its trainer is given.
"""

from __future__ import annotations

import math
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy as np
from anyio.from_thread import start_blocking_portal

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.run_folder import policy_folder
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.api.arguments import TasksArgument, parse_arguments, write_tasks_file
from fleetbus_workers.learner.checkpoints import find_origin
from fleetbus_workers.learner.disk_full import tell_full_disk
from fleetbus_workers.learner.resume import wait_for_resume_point
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url
from fleetbus_workers.trainers.handover import Handover
from fleetbus_workers.trainers.learner_thread import LearnerThread
from fleetbus_workers.trainers.rows import Row
from fleetbus_workers.trainers.trainer import HandoverTrainer, format_history, read_state
from fleetbus_workers.trainers.weights import SentWeights

if TYPE_CHECKING:
    import torch

    from fleetbus.config.settings import Configuration

METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl": "kl",
    "learning_rate": "learning_rate",
    "clip_ratio/region_mean": "clip_fraction",
}
"""TRL's names of what a step reports, and ours."""


class TrlRollouts:
    """``rollout_worker`` of an ``AsyncGRPOTrainer``, and the run's learner behind it.

    Keyword arguments are those of `fleetbus.train` (``name``, ``tasks``, ``folder``, ``steps``, ``learner_groups``, ...), over
    the variables ``FLEETBUS_*`` and fleetbus.toml as with every command; a list of tasks is written to a file in the run's
    folder. The run is made before (`fleetbus init`), and its environment and inference workers are started as for any learner.
    Of several processes that train one model, only the first has a learner. Raises `UserError`.
    """

    def __init__(self, *, tasks: TasksArgument = None, config: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        arguments = parse_arguments(None, tasks, config, settings)
        with write_tasks_file(arguments):
            self.configuration: Configuration = arguments.loaded.configuration
        self._weights = SentWeights(policy_folder(self.configuration.run).weights.absolute())
        self._learner = LearnerThread(self.configuration)
        self._handover: Handover | None = None
        self._folders = [policy_folder(self.configuration.run).weights.absolute()]
        """Where TRL's process writes."""
        self._groups: dict[str, int] = {}
        self.model_version = 0
        self.rollout_buffer: Any = _Samples(self)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.weight_transfer = _WeightTransfer(self._weights, lambda: self._learner.check_started())

    @property
    def dataset(self) -> Any:
        """One empty prompt: TRL asks for a dataset, and the tasks are the run's. It has no length, so that no number of passes
        over it ends training."""
        from datasets import Dataset

        return Dataset.from_dict({"prompt": [""]}).to_iterable_dataset()

    @property
    def handover(self) -> Handover:
        if self._handover is None:
            raise UserError("call rollouts.attach(trainer) before trainer.train()")
        return self._handover

    def attach(self, trainer: Any) -> None:
        """Check the trainer's settings against the run's, and follow its steps; in every process. Raises `UserError`."""
        arguments, processes = trainer.args, trainer.accelerator.num_processes
        check_arguments(arguments, self.configuration)
        given = trainer.rollout_worker, trainer.weight_transfer
        if trainer.accelerator.is_main_process and given != (self, self.weight_transfer):
            raise UserError("AsyncGRPOTrainer(rollout_worker=rollouts, weight_transfer=rollouts.weight_transfer)")
        self._learner = LearnerThread(record_optimizer(arguments, self.configuration))
        self._folders.append(Path(arguments.output_dir).absolute())
        rows = arguments.per_device_train_batch_size * processes
        self._handover = Handover(rows_per_step=rows * arguments.gradient_accumulation_steps, rows_ahead=rows)
        trainer.add_callback(build_callback(self._handover, trainer.accelerator))

    def find_checkpoint(self) -> str | None:
        """The checkpoint of TRL's that the run goes on from, for ``resume_from_checkpoint``; None at the start. Raises
        `UserError` if there is no such run, if it has finished, or if the checkpoint is not whole."""
        with start_blocking_portal() as portal:  # a notebook's thread has a loop already
            return portal.call(self._find_checkpoint)

    async def _find_checkpoint(self) -> str | None:
        configuration = self.configuration
        run, url = configuration.run.name, resolve_server_url(configuration)
        access = build_access("learner", configuration.nats.auth, run)
        async with connect(url, run=run, role="learner", worker=generate_worker_name("learner"), **access) as bus:
            await bus.check_log()
            point = await wait_for_resume_point(bus, Subjects(run), configuration, anyio.Event(), Runtime())
        if point is None:
            raise UserError(f"run {run} has finished: give more steps, or another name")
        begin = point.checkpoint_path or find_origin(configuration.learner.begin_with)
        return None if begin is None else read_state(begin).folder

    # What TRL calls, in this order.

    def start(self) -> None:
        """Begin the learner; the first weights are sent."""
        self._learner.start(HandoverTrainer(self.handover, self._weights, steps=self.configuration.learner.steps))

    def update_model_version(self, model_version: int) -> None:
        """Rows are given as of this version: how old they may be the learner decides (``learner.max_staleness``)."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RuntimeError` if the learner has ended: TRL asks while it waits for rows, however long that takes."""
        self._learner.check()

    def stop(self) -> None:
        """After the last batch wait for what the learner still does; else end it: the run goes on from its last checkpoint."""
        try:
            if self._handover is not None and self._handover.is_complete:
                self._learner.finish()
        finally:
            if self._handover is not None:
                self._handover.close("the trainer has ended before the run's last step")
                if not self._handover.is_complete:
                    tell_full_disk(self._folders)
            self._learner.cancel()
            self._weights.clear()

    def convert(self, row: Row) -> Any:
        """A row as TRL's ``RolloutSample``."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=row.ids.astype(np.int64),
            completion_mask=row.loss_mask.astype(np.int64),
            old_log_probs=row.logprobs,
            advantage=row.advantage,
            model_version=self.model_version,
            group_id=self._groups.setdefault(row.group_id, len(self._groups)),
            metrics={},
            enqueued_at=time.time(),
        )


class _Samples:
    """The queue that TRL takes rows from; nobody else puts any in."""

    def __init__(self, rollouts: TrlRollouts) -> None:
        self._rollouts = rollouts

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Raises `queue.Empty` after ``timeout`` seconds."""
        return self._rollouts.convert(self._rollouts.handover.take(timeout if block else 0.0))

    def qsize(self) -> int:
        return len(self._rollouts.handover)


class _WeightTransfer:
    """TRL's ``WeightTransferProtocol``: engines need no pause, they take a version between two turns."""

    def __init__(self, weights: SentWeights, check: Callable[[], None]) -> None:
        self._weights, self._check = weights, check

    def init_weight_transfer(self) -> None:
        """Nothing is to be set up."""

    def pause(self) -> None:
        """Nothing is paused."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keep them, until the learner makes a version of them. Waits for room on the disk while there is a learner."""
        self._weights.write(iterator, check=self._check)

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Nothing is held."""


def check_arguments(arguments: Any, configuration: Configuration) -> None:
    """Raise `UserError` if an ``AsyncGRPOConfig`` does not go with the run's settings."""
    sampled, kept, limit = configuration.episode.temperature, configuration.learner.keep_checkpoints, arguments.save_total_limit
    if arguments.token_budget is None or arguments.token_budget > 0:
        raise UserError("AsyncGRPOConfig(token_budget=0): a step has a fixed number of rows, so that batches end with steps")
    if arguments.weight_sync_steps != 1:
        raise UserError("AsyncGRPOConfig(weight_sync_steps=1): a batch is trained once its weights are sent")
    if not math.isclose(arguments.temperature, sampled):
        raise UserError(f"AsyncGRPOConfig(temperature={arguments.temperature}), but the run samples at {sampled}")
    if arguments.save_strategy != "no" or arguments.save_only_model:
        raise UserError('AsyncGRPOConfig(save_strategy="no", save_only_model=False): learner.checkpoint_every says when')
    if limit is not None and 0 < limit <= kept:
        raise UserError(
            f"AsyncGRPOConfig(save_total_limit={limit}) removes what a checkpoint of the run names: give more than "
            f"learner.keep_checkpoints = {kept}"
        )


def record_optimizer(arguments: Any, configuration: Configuration) -> Configuration:
    """The settings with TRL's bounds in the place of ours: the run's log, and `fleetbus diagnose`, say what trained."""
    bounds = {"learning_rate": arguments.learning_rate, "max_grad_norm": arguments.max_grad_norm}
    learner = msgspec.structs.replace(configuration.learner, **{name: bound for name, bound in bounds.items() if bound > 0})
    return msgspec.structs.replace(configuration, learner=learner)


def build_callback(handover: Handover, accelerator: Any) -> Any:
    """Tells the handover of steps and checkpoints, and TRL of what the learner asks for; the last of the trainer's callbacks,
    so that weights are sent before. The first process decides for all."""
    import torch
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            handover.begin(state.global_step, format_history(state.log_history))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
            """With a gradient of zero, momentum and decay would move the weights; without any an optimizer leaves them."""
            is_filler = torch.tensor(accelerator.is_main_process and handover.is_filler_step(), device=accelerator.device)
            is_filler = accelerator.reduce(is_filler.to(torch.int32), reduction="sum")
            if bool(is_filler) and getattr(accelerator, "scaler", None) is None:  # that one wants to have seen a gradient
                optimizer.zero_grad()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            decided = handover.end_step() if accelerator.is_main_process else (False, False)
            shared = accelerator.reduce(torch.tensor(decided, dtype=torch.int32, device=accelerator.device), reduction="sum")
            control.should_save, stop = bool(shared[0]), bool(shared[1])
            control.should_training_stop = control.should_training_stop or stop
            if state.global_step >= state.max_steps and not stop:
                raise UserError(
                    f"AsyncGRPOConfig(max_steps={state.max_steps}) is reached before the run's last batch: give more; the run "
                    "goes on from its last checkpoint"
                )

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            accelerator.wait_for_everyone()  # each process writes a file of its own
            handover.save(Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}")

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            found = {METRICS[name]: value for name, value in (logs or {}).items() if name in METRICS}
            found = {name: float(value) for name, value in found.items() if value is not None}  # what was NaN throughout
            handover.metrics = found or handover.metrics

    return Callback()
