"""The learner: asks for groups of episodes, trains batches of them, publishes each new version of the policy.

Above it is the command line; below are its parts (`fleetbus_workers.learner.parts`), the bus and one `Trainer`. It never acks:
it follows the log from a position, and its checkpoints say which requests are settled.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import structlog
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.check import check_trained_distribution
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration
from fleetbus.core.training.groups import Group
from fleetbus.delivery.control import Control, run_until_drained
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus_schemas import Heartbeat, Subjects, TrainingFinished
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.disk_full import retry_while_disk_full
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.journal import JournalMoved
from fleetbus_workers.learner.parts import LearnerParts, make_parts
from fleetbus_workers.learner.resume import ResumePoint, wait_for_resume_point

log = structlog.get_logger()

FULL_CHECK_SECONDS = 1.0
"""How often a learner that waits for groups looks whether admission waits for the log."""


class Learner:
    """One lineage from its beginning to its last step, or until ``drain`` is set."""

    def __init__(
        self,
        bus: Bus,
        parts: LearnerParts,
        *,
        configuration: Configuration,
        name: str,
        drain: anyio.Event,
        trainer: Trainer,
        resume_point: ResumePoint,
        runtime: Runtime,
    ) -> None:
        self._bus = bus
        self._parts = parts
        self._configuration = configuration
        self._settings = configuration.learner
        self._name = name
        self._drain = drain
        self._trainer = trainer
        self._resume_point = resume_point
        self._runtime = runtime
        self._is_left = False

    async def run(self) -> None:
        """Train until the last step or until drained."""
        bus, subjects, parts = self._bus, Subjects(self._configuration.run.name), self._parts
        lifecycle = WorkerLifecycle(bus, subjects, role="learner", worker=self._name, beat=self._build_heartbeat, lane=None)
        control = Control(bus, subjects, role="learner", worker=self._name, drain=self._drain, pause=parts.admission.pause)
        await parts.start.run(self._configuration, worker=self._name)
        async with parts.publication.run():
            await parts.steps.publish_version()
            await self._work(lifecycle, control)

    async def _work(self, lifecycle: WorkerLifecycle, control: Control) -> None:
        bus, subjects, parts = self._bus, Subjects(self._configuration.run.name), self._parts
        async with run_lifecycle(lifecycle, bus, None, slots=self._settings.groups), anyio.create_task_group() as group:
            group.start_soon(control.run)
            group.start_soon(parts.results.follow, self._resume_point.floor)
            group.start_soon(parts.appender.watch)
            group.start_soon(parts.requests.close_expired, parts.results.enter)
            group.start_soon(parts.admission.run, self._drain)
            group.start_soon(parts.admission.follow, bus, subjects)
            await self._train(group)
            group.cancel_scope.cancel()

    async def _train(self, tasks: TaskGroup) -> None:
        parts = self._parts
        while not self._is_done and not self._drain.is_set():
            if parts.evaluations.is_due:
                await run_until_drained(self._drain, parts.evaluations.play_due)
            await self._train_batch(tasks)
        if self._drain.is_set() and not self._is_done:
            if self._settings.checkpoint_at_stop:
                with self._count_work():
                    await parts.checkpoints.store()
            log.info("drained", step=parts.progress.step)
            return
        await self._finish()

    @property
    def _is_done(self) -> bool:
        """True after the last step, and when nobody asks any more for what would be the next batch."""
        return self._parts.progress.step >= self._settings.steps or self._is_left

    async def _train_batch(self, tasks: TaskGroup) -> None:
        parts, waited = self._parts, anyio.current_time()
        groups = await self._wait_for_batch()
        if not groups:
            return
        step, version = parts.progress.step, parts.publication.version
        with self._count_work():
            batch = await parts.batches.train(groups, step=step, version=version, waited=waited)
            if batch is not None:
                await parts.steps.record(batch, tasks)

    @contextmanager
    def _count_work(self) -> Iterator[None]:
        """The block waits for nobody, however long it takes; whoever listens sees by the counters that it has begun."""
        counters = self._parts.progress.counters
        counters["begun_work"] += 1
        try:
            yield
        finally:
            counters["ended_work"] += 1

    async def _wait_for_batch(self) -> list[Group]:
        """The groups of the next step; [] when drained while waiting, or when there will be none."""
        pool, checkpoints, admission = self._parts.pool, self._parts.checkpoints, self._parts.admission
        while not self._drain.is_set():
            groups = pool.take(self._settings.groups, self._parts.progress.step)
            if groups:
                return groups
            if isinstance(admission, JoinedRequests) and admission.is_over:
                self._is_left = True
                return []
            if await self._is_log_full() and checkpoints.pending is not None:
                with self._count_work():
                    await checkpoints.store()  # the log is trimmed up to a checkpoint only
            with anyio.move_on_after(FULL_CHECK_SECONDS):
                await run_until_drained(self._drain, pool.changed.wait)
        return []

    async def _is_log_full(self) -> bool:
        """True if new requests wait for room; who asks for none looks by itself, for the pool too."""
        requests = self._parts.requests
        if self._settings.requested_by:
            requests.full = await requests.is_short_of_room()
        return requests.full

    async def _finish(self) -> None:
        """Store the model, evaluate it, and exclude what was not trained; the last entry says that training has finished."""
        parts, model = self._parts, policy_folder(self._configuration.run).model
        with self._count_work():
            await parts.checkpoints.store()
            await retry_while_disk_full(self._runtime, self._trainer.save_model, model)
        await run_until_drained(self._drain, parts.evaluations.play_end)
        if self._drain.is_set():
            return
        await parts.results.enter_stored(parts.ledger.floor)
        parts.pool.discard_all("training_finished")
        more = True
        while more:
            excluded = tuple(parts.pool.take_exclusions())
            more = parts.pool.has_exclusions
            lineage, step, version = parts.progress.lineage, parts.progress.step, parts.publication.version
            await parts.appender.append(
                TrainingFinished(lineage=lineage, step=step, version=version, excluded=excluded, more=more)
            )
        log.info("training finished", model=str(model))

    def _build_heartbeat(self) -> Heartbeat:
        parts, progress = self._parts, self._parts.progress
        unpublished = self._settings.groups if parts.pool.published_step < progress.step else 0
        return Heartbeat(
            role="learner",
            worker=self._name,
            slots=self._settings.groups,
            in_flight=len(parts.pool) + unpublished,  # what is asked for now would be played with the version before
            policy_version=parts.publication.version,
            draining=self._drain.is_set(),
            problem=parts.appender.problem or parts.publication.problem,
            paused=parts.admission.is_paused,
            counters=dict(progress.counters)
            | {
                "step": float(progress.step),
                "seconds_checkpoint": parts.checkpoints.seconds,
                "groups_seen": float(parts.admission.next_group),
            },
            policy=self._configuration.run.policy,
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
    runtime, subjects, judge = runtime or Runtime(), Subjects(configuration.run.name), judge or GroupJudge()
    while True:
        resume_point = await wait_for_resume_point(bus, subjects, configuration, drain, runtime)
        if resume_point is None:
            return
        parts = make_parts(
            bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum,
            resume_point=resume_point, runtime=runtime, judge=judge,
        )  # fmt: skip
        learner = Learner(
            bus, parts, configuration=configuration, name=name, drain=drain, trainer=trainer, resume_point=resume_point,
            runtime=runtime,
        )  # fmt: skip
        try:
            return await learner.run()
        except JournalMoved as moved:
            log.info("the learner before has trained on meanwhile; beginning again", reason=str(moved))
