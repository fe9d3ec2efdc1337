"""TRL's `GRPOTrainer` on a run: its rollouts are episodes of the run's workers, its weights the versions that they sample.

    rollouts = FleetbusRollouts(name="r1", nats_url="nats://host:4222", tasks="tasks.json")
    trainer = GRPOTrainer(model, rollouts.reward, train_dataset=rollouts.dataset, rollout_func=rollouts)

The run is made before (`fleetbus init`), and its environment and inference workers are started as for any learner; the place of
the learner is TRL's. Needs the extra ``trl``.
"""

from __future__ import annotations

import atexit
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import anyio
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.client.rollouts import Episode, rollouts
from fleetbus.client.trainer_formats import convert_to_trl
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.api.arguments import TasksArgument, parse_arguments
from fleetbus_workers.assembly.learner_parts import build_curriculum
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url
from fleetbus_workers.trainers.episode_rows import find_row_problem, find_vocabulary, spread_rows
from fleetbus_workers.trainers.publishing import WeightsPublisher, open_publisher

log = structlog.get_logger()

Episodes = dict[str, list[Episode]]
T = TypeVar("T")

TOLD_EVERY_SECONDS = 60.0


class FleetbusRollouts:
    """A ``rollout_func``: one call plays an episode per prompt, which is the key of a task, and returns when all are over.

    Before it the trainer's weights become a version, if a step was taken since: no other version answers, as TRL takes rows for
    samples of its present weights. ``publish`` False: the inference workers sample from a server that the trainer itself keeps
    up to date. An episode that fails is asked for again, ``retries`` times; then its row has no token that is trained and no
    reward, which TRL leaves out of the group's mean. Other keyword arguments are those of `fleetbus.train`, over variables and
    fleetbus.toml as with every command. Of several processes the first publishes. Raises `UserError`.
    """

    def __init__(
        self,
        *,
        tasks: TasksArgument = None,
        config: str | os.PathLike[str] | None = None,
        publish: bool = True,
        retries: int = 3,
        **settings: Any,
    ) -> None:
        arguments = parse_arguments(None, tasks, config, settings)
        self.configuration = arguments.loaded.configuration
        curriculum = None if arguments.tasks else build_curriculum(self.configuration)
        self._train = [*arguments.tasks] if curriculum is None else curriculum.tasks[: -len(curriculum.held_out) or None]
        self._tasks = {task.key: task for task in (arguments.tasks if curriculum is None else curriculum.tasks)}
        self._publish, self._retries = publish, retries
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._bus: NatsBus | None = None
        self._publisher: WeightsPublisher | None = None
        self._published: tuple[Any, int] = (None, -1)
        self.excluded: Counter[str] = Counter()
        """Episodes that failed by outcome, asked for again or not."""

    @property
    def dataset(self) -> Any:
        """The training tasks' keys, as ``prompt``."""
        from datasets import Dataset

        return Dataset.from_dict({"prompt": [task.key for task in self._train]})

    @staticmethod
    def reward(completions: Sequence[Any], episode_reward: Sequence[float | None], **_: Any) -> list[float | None]:
        """The reward function: each episode's own, None for one that failed."""
        return list(episode_reward)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """One row per prompt, in their order. Raises `RuntimeError` if no episode at all could be played."""
        if unknown := {*prompts} - {*self._tasks}:
            raise UserError(f"prompt {min(unknown)!r} is the key of no task: give train_dataset=rollouts.dataset")
        version = self._publish_weights(trainer)
        self._bus = self._bus or self._connect("operator")
        vocabulary = find_vocabulary(trainer)
        episodes = self._call(self._play_and_tell, Counter(prompts), version, trainer.args.temperature, vocabulary)
        rows = [episodes[key].pop() if episodes[key] else None for key in prompts]
        converted = convert_to_trl([row for row in rows if row is not None])
        return {name: spread_rows(rows, values, name) for name, values in converted.items()}

    def close(self) -> None:
        """End connections; a later call makes new ones."""
        self._portal = self._bus = self._publisher = None
        self._published = (None, -1)
        self._stack.close()

    def _publish_weights(self, trainer: Any) -> int | None:
        """The version that the workers have to sample from, the same in every process; None for any."""
        if not self._publish:
            return None
        from accelerate.utils import broadcast_object_list

        accelerator = trainer.accelerator
        if str(accelerator.distributed_type.value) in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise UserError(
                f"weights that {accelerator.distributed_type.value} may have sharded are not published: use TrlRollouts"
            )
        model, step = accelerator.unwrap_model(trainer.model), trainer.state.global_step
        if hasattr(model, "peft_config"):  # in every process: one that went on would wait for the first
            raise UserError("an adapter's weights are not published alone: train all weights, or give publish=False")
        if accelerator.is_main_process and self._published != (trainer, step):
            if self._publisher is None:
                self._publisher = self._call(partial(open_publisher, self._connect("learner"), self.configuration))
            self._call(partial(self._publisher.publish, [*model.named_parameters()], step=step))
            self._published = (trainer, step)
        (version,) = broadcast_object_list([None if self._publisher is None else self._publisher.version])
        return int(version)

    async def _play_and_tell(self, *asked: Any) -> Episodes:
        """As `_play`; a long wait is told, as for workers that nobody started."""
        async with open_first_error_task_group() as telling:
            telling.start_soon(self._tell_waits)
            found = await self._play(*asked)
            telling.cancel_scope.cancel()
        return found

    async def _tell_waits(self) -> None:
        while True:
            await anyio.sleep(TOLD_EVERY_SECONDS)
            log.warning("waiting for episodes; `fleetbus top` shows the run's workers", run=self.configuration.run.name)

    async def _play(self, wanted: Counter[str], version: int | None, temperature: float, vocabulary: float) -> Episodes:
        """So many episodes with a reward per task, or fewer of those that failed each time."""
        found: Episodes = defaultdict(list)
        reasons: list[str] = []
        play = partial(rollouts, version=version or 0, pinned=version is not None, temperature=temperature)
        for _ in range(1 + self._retries):
            by_size: dict[int, list[Task]] = defaultdict(list)
            for key, count in wanted.items():
                by_size[count - len(found[key])].append(self._tasks[key])
            by_size.pop(0, None)
            async with open_first_error_task_group() as playing:
                for size, tasks in by_size.items():
                    playing.start_soon(self._play_groups, play, tasks, size, vocabulary, found, reasons)
        if not any(found.values()):
            raise RuntimeError(f"no episode of {wanted.total()} was played: {reasons[-1]}")
        if missing := wanted.total() - sum(map(len, found.values())):
            log.warning("episodes failed; leaving their rows out", episodes=missing, reason=reasons[-1])
        return found

    async def _play_groups(
        self, play: Callable[..., Any], tasks: list[Task], size: int, vocabulary: float, found: Episodes, reasons: list[str]
    ) -> None:
        async with play(self._bus, self.configuration, tasks, group_size=size, groups_at_a_time=len(tasks)) as groups:
            async for group in groups:
                for episode in group.episodes:
                    if problem := find_row_problem(episode, vocabulary):
                        reasons.append(f"{episode.outcome}: {problem}")
                        self.excluded[episode.outcome] += 1
                    else:
                        found[group.task.key].append(episode)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run on the loop of these rollouts and wait."""
        running = self._open_loop().start_task_soon(function, *args)
        try:
            return running.result()
        finally:
            running.cancel()  # of an interrupted program; else it is over

    def _open_loop(self) -> BlockingPortal:
        """The loop in a thread, which begins with the first call and ends with the process."""
        if self._portal is None:
            loop = start_blocking_portal("asyncio", backend_options={"use_uvloop": True})
            self._portal = self._stack.enter_context(loop)
            self._stack.callback(self._portal.call, self._portal.stop, True)  # a connection may not be made yet
            atexit.register(self.close)
        return self._portal

    def _connect(self, role: str) -> NatsBus:
        run, auth, url = self.configuration.run.name, self.configuration.nats.auth, resolve_server_url(self.configuration)
        opened = connect(url, run=run, role=role, worker=generate_worker_name(role), **build_access(role, auth, run))
        bus = self._stack.enter_context(self._open_loop().wrap_async_context_manager(opened))
        self._call(bus.check_log)
        return bus
