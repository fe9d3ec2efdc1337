"""The learner: asks for groups of episodes, trains batches of them, publishes each new version of the policy.

Above it is the command line; below are the bus and one `Trainer`. It never acks: it follows the log from a position, and its
checkpoints say which requests are settled. Being refused on its own subjects means that it has been replaced.
"""

from collections import defaultdict
from pathlib import Path

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.check import check_trained_distribution
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus.core.training.groups import Group
from fleetbus.core.training.ledger import Ledger
from fleetbus.delivery.control import Control, run_until_drained
from fleetbus.delivery.requests import Requests
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus.log.episodes import decode_episode_entry, scan_training_results
from fleetbus.log.floor import fence_floor
from fleetbus_schemas import EpisodeFinished, Heartbeat, LineageStarted, StepTrained, Subjects, TrainingFinished
from fleetbus_workers.images.reader import image_reader
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.batch_metrics import SignalLog, compute_advantage_metrics, measure_groups
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.checkpoint_storage import CheckpointStorage
from fleetbus_workers.learner.checkpoints import Checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.disk_full import retry_while_disk_full
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.pool import GroupPool, compute_max_replaced
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.resume import (
    ResumePoint,
    read_requests_from_floor,
    select_lineage_settings,
    wait_for_resume_point,
)
from fleetbus_workers.learner.training_digest import train_with_digests
from fleetbus_workers.weights.store import get_object_store, open_store

log = structlog.get_logger()

FULL_CHECK_SECONDS = 1.0
"""How often a learner that waits for groups looks whether admission waits for the log."""


class Learner:
    """One lineage from its beginning to its last step, or until ``drain`` is set."""

    def __init__(
        self,
        bus: Bus,
        *,
        configuration: Configuration,
        name: str,
        drain: anyio.Event,
        trainer: Trainer,
        curriculum: Curriculum,
        resume_point: ResumePoint,
        runtime: Runtime,
        judge: GroupJudge | None = None,
    ) -> None:
        self._bus = bus
        self._judge = judge or GroupJudge()
        self._configuration = configuration
        self._settings = configuration.learner
        self._name = name
        self._drain = drain
        self._trainer = trainer
        self._curriculum = curriculum
        self._resume_point = resume_point
        self._runtime = runtime
        self._subjects = Subjects(configuration.run.name)
        self._images = image_reader(bus, configuration.run.name)
        self._folder = run_folder(configuration.run)
        policy = configuration.run.policy
        self._train = FencedAppender(bus, self._subjects.train(policy), resume_point.train_last)
        self._publication = Publication(
            bus,
            self._subjects,
            trainer,
            policy=policy,
            lineage=resume_point.lineage,
            folder=self._folder.weights,
            keep=self._settings.keep_weights,
            runtime=runtime,
            store=open_store(
                bus, configuration.weights.store, run=configuration.run.name, public_url=configuration.weights.public_url
            ),
            objects=get_object_store(bus, configuration.run.name),
            full_every=configuration.weights.full_every,
        )
        self._lineage = resume_point.lineage
        self._step = resume_point.step
        settled = resume_point.checkpoint.settled if resume_point.checkpoint else ()
        self._ledger = Ledger(resume_point.floor, settled)
        self._pool = GroupPool(
            self._ledger,
            minimum=self._settings.min_group_size,
            max_staleness=self._settings.max_staleness,
            stale_groups=self._settings.stale_groups,
            replace_flat=compute_max_replaced(configuration),
            max_abs_reward=configuration.environment.max_abs_reward,
            is_log_full=lambda: self._requests.full,
        )
        self._requests = Requests(bus, self._subjects, configuration=configuration, worker=name, runtime=runtime)
        self._admission = Admission(
            self._requests,
            self._pool,
            curriculum,
            settings=self._settings,
            lineage=resume_point.lineage,
            floor=resume_point.floor,
            next_group=resume_point.next_group,
            progress=lambda: (self._step, self._publication.version),
        )
        self._evaluations = Evaluations(self._requests, success_threshold=configuration.evaluation.success_threshold)
        self._evaluated = set(resume_point.evaluated)
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._checkpoints = CheckpointStorage(
            self._train,
            trainer,
            runtime,
            folder=self._folder.checkpoints.absolute(),
            keep=self._settings.keep_checkpoints,
            is_voided=resume_point.is_voided,
            restarts=resume_point.restarts,
        )
        self._signal = SignalLog()

    async def run(self) -> None:
        """Train until the last step or until drained."""
        bus, subjects = self._bus, self._subjects
        lifecycle = WorkerLifecycle(bus, subjects, role="learner", worker=self._name, beat=self._build_heartbeat, lane=None)
        control = Control(bus, subjects, role="learner", worker=self._name, drain=self._drain, pause=self._admission.pause)
        await self._start_lineage()
        async with run_lifecycle(lifecycle, bus, None, slots=self._settings.groups), anyio.create_task_group() as group:
            self._tasks = group
            group.start_soon(control.run)
            group.start_soon(self._follow_results)
            group.start_soon(self._train.watch)
            group.start_soon(self._requests.close_expired, self._enter_result)
            group.start_soon(self._admission.run, self._drain)
            await self._train_steps()
            group.cancel_scope.cancel()

    # Beginning and end

    async def _start_lineage(self) -> None:
        """Restore, announce the lineage, take over the open requests, publish the first version."""
        resume_point = self._resume_point
        if resume_point.checkpoint_path is not None:
            await self._runtime.offload(self._trainer.restore, resume_point.checkpoint_path)
        started = LineageStarted(
            lineage=self._lineage,
            worker=self._name,
            parent=resume_point.parent,
            parent_step=resume_point.step,
            floor=resume_point.floor,
            seed=self._configuration.run.seed,
            nonce=self._runtime.nonce(),
            settings=select_lineage_settings(self._configuration),
            restart=resume_point.restart,
        )
        if resume_point.untold and resume_point.checkpoint is not None and resume_point.checkpoint_path is not None:
            await self._checkpoints.announce(resume_point.checkpoint, resume_point.checkpoint_path)
        await self._train.append(started)
        floor = await fence_floor(self._bus, self._subjects)
        versions = await self._publication.fence(started)
        log.info("lineage started", lineage=self._lineage, parent=resume_point.parent, step=self._step)
        for version, step in versions.items():
            self._pool.record_version(version, step)
        requests = await read_requests_from_floor(self._bus, self._subjects, self._configuration.run.pool, resume_point)
        await self._requests.assume_size(len(requests))
        await self._admission.take_over(requests, floor.groups.get(self._configuration.run.policy, 0))
        await self._publish_version()

    async def _train_steps(self) -> None:
        while self._step < self._settings.steps and not self._drain.is_set():
            if (name := self._find_due_evaluation()) is not None:
                await run_until_drained(self._drain, self._evaluate, name, self._configuration.episode.temperature)
                if not self._step and self._configuration.evaluation.greedy_start:
                    await run_until_drained(self._drain, self._evaluate, "start_greedy", 0.0)
            await self._train_batch()
        if self._drain.is_set() and self._step < self._settings.steps:
            if self._settings.checkpoint_at_stop:
                await self._checkpoints.store()
            log.info("drained", step=self._step)
            return
        await self._finish_training()

    def _find_due_evaluation(self) -> str | None:
        """The name of the evaluation that belongs before the next step, unless it was played: a learner before may have been
        killed in it, and a batch that could not be trained asks again."""
        evaluation = self._configuration.evaluation
        name = f"step{self._step}" if self._step else "start"
        wanted = evaluation.every and self._step % evaluation.every == 0 if self._step else evaluation.episodes
        return name if wanted and name not in self._evaluated else None

    async def _finish_training(self) -> None:
        await self._checkpoints.store()
        await retry_while_disk_full(self._runtime, self._trainer.save_model, self._folder.model)
        if self._configuration.evaluation.episodes:
            await run_until_drained(self._drain, self._evaluate_end)
        if self._drain.is_set():
            return
        async for sequence, result in scan_training_results(self._bus, self._subjects, start=self._ledger.floor):
            self._pool.add_result(result, sequence)  # a learner that starts at the last step may not have read any yet
        self._pool.discard_all("training_finished")
        while True:
            excluded = tuple(self._pool.take_exclusions())
            more = self._pool.has_exclusions
            version = self._publication.version
            await self._train.append(
                TrainingFinished(lineage=self._lineage, step=self._step, version=version, excluded=excluded, more=more)
            )
            if not self._pool.has_exclusions:
                break
        log.info("training finished", model=str(self._folder.model))

    async def _evaluate_end(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._evaluate, "end", self._configuration.episode.temperature)
            if self._configuration.evaluation.greedy:
                group.start_soon(self._evaluate, "end_greedy", 0.0)

    async def _evaluate(self, name: str, temperature: float) -> None:
        started = anyio.current_time()
        tasks = self._curriculum.evaluation(self._configuration.evaluation.episodes)
        if not tasks:
            return
        self._evaluated.add(name)
        evaluated = await self._evaluations.play(
            name, tasks, lineage=self._lineage, step=self._step, version=self._publication.version, temperature=temperature
        )
        self._counters["seconds_evaluate"] += anyio.current_time() - started
        if evaluated is None:  # a step makes room, and stands behind this
            log.warning("log has no room for an evaluation; leaving it out", name=name, step=self._step)
            return
        log.info("evaluated", name=name, success=round(evaluated.success, 3), graded=evaluated.graded)
        await self._train.append(evaluated)

    # Requests and results

    async def _follow_results(self) -> None:
        """Read results from the floor on, for ever; claims and goodbyes stand on the same subjects."""
        async with self._bus.read([self._subjects.episodes], start=self._resume_point.floor) as reader:
            while True:
                stored = await reader.receive()
                entry = decode_episode_entry(stored)
                if isinstance(entry, EpisodeFinished):
                    self._requests.record_result(stored.sequence, entry.episode_id)
                    self._counters["results"] += 1
                    self._enter_result(entry, stored.sequence)

    def _enter_result(self, result: EpisodeFinished, sequence: int | None = None) -> None:
        """``sequence``: where it was read; None if it is this learner's own."""
        if result.split == "eval":
            self._evaluations.add_result(result)
        else:
            self._pool.add_result(result, result.request_sequence if sequence is None else sequence)

    # One step

    async def _train_batch(self) -> None:
        waited = anyio.current_time()
        groups = await self._wait_for_batch()
        if not groups:
            return
        rewards = await self._judge.grade(groups, self._drain)
        if not (groups := self._pool.discard_ungraded(groups)) or self._drain.is_set():
            return
        read = anyio.current_time()
        sequences = await read_sequences(
            self._bus,
            self._subjects,
            groups,
            plan=CreditPlan.from_configuration(self._configuration),
            temperature=self._configuration.episode.temperature,
            archive=Path(self._settings.archive) if self._settings.archive else None,
            runtime=self._runtime,
            images=self._images,
            trainer=self._trainer,
        )
        if not (groups := self._pool.discard_ungraded(groups)):
            return
        trained = anyio.current_time()
        progress = self._step / self._settings.steps
        digests, metrics = await self._runtime.offload(
            train_with_digests, self._trainer, sequences, version=self._publication.version, progress=progress
        )
        done = anyio.current_time()
        metrics |= compute_advantage_metrics(sequences) | measure_groups(
            groups,
            self._pool,
            step=self._step,
            max_staleness=self._settings.max_staleness,
            success_threshold=self._configuration.evaluation.success_threshold,
        )
        metrics |= {"seconds_wait": read - waited, "seconds_read": trained - read, "seconds_train": done - trained}
        await self._record_step(groups, metrics, digests, rewards)

    async def _wait_for_batch(self) -> list[Group]:
        """The groups of the next step; [] when drained while waiting."""
        while not self._drain.is_set():
            groups = self._pool.take(self._settings.groups, self._step)
            if groups:
                return groups
            if self._requests.full and self._checkpoints.pending is not None:
                await self._checkpoints.store()  # the log is trimmed up to a checkpoint only
            with anyio.move_on_after(FULL_CHECK_SECONDS):
                await run_until_drained(self._drain, self._pool.changed.wait)
        return []

    async def _record_step(
        self, groups: list[Group], metrics: dict[str, float], digests: dict[str, bytes], rewards: dict[str, float]
    ) -> None:
        """The step goes to the log before the version that it made; a checkpoint holds what the log says by then."""
        self._step += 1
        trained, excluded = self._pool.settle(groups)
        self._checkpoints.pending = Checkpoint(
            lineage=self._lineage,
            step=self._step,
            version=self._publication.version + 1,
            floor=self._ledger.floor,
            settled=self._ledger.settled_above,
            next_group=self._admission.next_group,
            first_open_group=self._admission.first_open_group,
        )
        self._ledger.forget_settled()
        done = StepTrained(
            lineage=self._lineage,
            step=self._step,
            version=self._publication.version + 1,
            episodes=tuple(trained),
            excluded=tuple(excluded),
            metrics={name: float(value) for name, value in metrics.items()},
            digests=tuple(digests[episode] for episode in trained),
            rewards={episode: rewards[episode] for episode in trained if episode in rewards},
        )
        await self._train.append(done)
        measured = {name: round(done.metrics[name], 3) for name in ("success", "reward") if name in done.metrics}
        log.info("trained", step=self._step, of=self._settings.steps, **measured)
        self._signal.record_step(done, self._bus.now_ns())
        await self._publish_version()
        self._counters["steps"] += 1
        due = self._step % self._settings.checkpoint_every == 0 or self._step == self._settings.steps
        if due or await self._requests.is_short_of_room():  # trimmed up to a checkpoint only, the log could fill meanwhile
            await self._checkpoints.start(self._tasks)

    async def _publish_version(self) -> None:
        started = anyio.current_time()
        self._pool.record_version(await self._publication.publish(self._step), self._step)
        self._counters["seconds_publish"] += anyio.current_time() - started

    def _build_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            role="learner",
            worker=self._name,
            slots=self._settings.groups,
            in_flight=len(self._pool),
            policy_version=self._publication.version,
            draining=self._drain.is_set(),
            paused=self._admission.is_paused,
            counters=dict(self._counters) | {"step": float(self._step), "seconds_checkpoint": self._checkpoints.seconds},
        )


async def run_learner(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    trainer: Trainer,
    curriculum: Curriculum,
    runtime: Runtime | None = None,
    judge: GroupJudge | None = None,
) -> None:
    """A learner from where the log says training stands to the last step. Raises `UserError` before anything is stored if the
    policy would be sampled from another distribution than the one that it trains."""
    check_trained_distribution(configuration.episode)
    subjects = Subjects(configuration.run.name)
    runtime = runtime or Runtime()
    resume_point = await wait_for_resume_point(bus, subjects, configuration, drain, runtime)
    if resume_point is None:
        return
    learner = Learner(
        bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum,
        resume_point=resume_point, runtime=runtime, judge=judge,
    )  # fmt: skip
    await learner.run()
