"""The learner: asks for groups of episodes, trains batches of them, publishes each new version of the policy.

Above it is the command line; below are the bus and one `Trainer`. It never acks: it follows the log from a position, and its
checkpoints say which requests are settled. Being refused on its own subjects means that it has been replaced.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.config.run_folder import RunFolder, run_folder
from fleetbus.config.settings import Configuration
from fleetbus.control import Control, unless_drained
from fleetbus.core.groups import Group
from fleetbus.core.ledger import Ledger
from fleetbus.episodes import episode_entry
from fleetbus.ports import Ports
from fleetbus.presence import Presence, present
from fleetbus.requests import Requests
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeFinished,
    Heartbeat,
    LineageStarted,
    StepTrained,
    Subjects,
    TrainingFinished,
)
from fleetbus_workers.images.reading import image_reader
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.beginning import Beginning, find_beginning, requests_from_floor
from fleetbus_workers.learner.book import Chain
from fleetbus_workers.learner.checkpoints import STATE, WEIGHTS, Checkpoint, prune, write_checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.disk import when_there_is_room
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.measures import measure_advantages, measure_groups
from fleetbus_workers.learner.pool import EXCLUSIONS_PER_ENTRY, GroupPool
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.signal_log import SignalLog
from fleetbus_workers.weights.store import objects_of, open_store

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
        beginning: Beginning,
        ports: Ports,
    ) -> None:
        self._bus = bus
        self._configuration = configuration
        self._settings = configuration.learner
        self._name = name
        self._drain = drain
        self._trainer = trainer
        self._curriculum = curriculum
        self._beginning = beginning
        self._ports = ports
        self._subjects = Subjects(configuration.run.name)
        self._images = image_reader(bus, configuration.run.name)
        self._folder: RunFolder = run_folder(configuration.run)
        policy = configuration.run.policy
        self._train = Chain(bus, self._subjects.train(policy), beginning.train_last)
        self._publication = Publication(
            bus,
            self._subjects,
            trainer,
            policy=policy,
            lineage=beginning.lineage,
            folder=self._folder.weights,
            keep=self._settings.keep_weights,
            ports=ports,
            store=open_store(
                bus, configuration.weights.store, run=configuration.run.name, public_url=configuration.weights.public_url
            ),
            objects=objects_of(bus, configuration.run.name),
            full_every=configuration.weights.full_every,
        )
        self._lineage = beginning.lineage
        self._step = beginning.step
        settled = beginning.checkpoint.settled if beginning.checkpoint else ()
        self._ledger = Ledger(beginning.floor, settled)
        self._pool = GroupPool(
            self._ledger,
            minimum=self._settings.min_group_size,
            max_staleness=self._settings.max_staleness,
            late=self._settings.late,
            replace_flat=_replaceable(configuration),
        )
        self._requests = Requests(bus, self._subjects, configuration=configuration, worker=name)
        self._admission = Admission(
            self._requests,
            self._pool,
            curriculum,
            settings=self._settings,
            lineage=beginning.lineage,
            next_group=beginning.checkpoint.next_group if beginning.checkpoint else 0,
            progress=lambda: (self._step, self._publication.version),
        )
        self._evaluations = Evaluations(self._requests)
        self._evaluated = set(beginning.evaluated)
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._unstored: Checkpoint | None = None
        self._signal = SignalLog()

    async def run(self) -> None:
        """Train until the last step or until drained."""
        bus, subjects = self._bus, self._subjects
        presence = Presence(bus, subjects, role="learner", worker=self._name, beat=self._heartbeat, lane=None)
        control = Control(
            bus,
            subjects,
            role="learner",
            worker=self._name,
            drain=self._drain,
            cancel=lambda episodes: (),
            busy_with=lambda: (),
        )
        await self._begin()
        async with present(presence, bus, None, slots=self._settings.groups), anyio.create_task_group() as group:
            group.start_soon(control.run)
            group.start_soon(self._follow_results)
            group.start_soon(self._train.watch)
            group.start_soon(self._requests.close_expired)
            group.start_soon(self._admission.run, self._drain)
            await self._work()
            group.cancel_scope.cancel()

    # Beginning and end

    async def _begin(self) -> None:
        """Restore, announce the lineage, take over the open requests, publish the first version."""
        beginning = self._beginning
        if beginning.checkpoint_path is not None:
            path = beginning.checkpoint_path
            await self._ports.offload(self._trainer.restore, path / WEIGHTS, path / STATE)
        started = LineageStarted(
            lineage=self._lineage,
            worker=self._name,
            parent=beginning.parent,
            parent_step=beginning.step,
            floor=beginning.floor,
            seed=self._configuration.run.seed,
            nonce=self._ports.nonce(),
        )
        await self._train.append(started)
        versions = await self._publication.fence(started, decided_on=self._train)
        log.info("lineage started", lineage=self._lineage, parent=beginning.parent, step=self._step)
        for version, step in versions.items():
            self._pool.published(version, step)
        requests = await requests_from_floor(self._bus, self._subjects, self._configuration.run.pool, beginning)
        await self._admission.take_over(requests)
        await self._publish_version()

    async def _work(self) -> None:
        while self._step < self._settings.steps and not self._drain.is_set():
            if (name := self._evaluation_due()) is not None:
                await unless_drained(self._drain, self._evaluate, name, self._configuration.episode.temperature)
            await self._train_batch()
        if self._drain.is_set() and self._step < self._settings.steps:
            if self._unstored is not None:
                await self._store_checkpoint(self._unstored)
            log.info("drained", step=self._step)
            return
        await self._finish()

    def _evaluation_due(self) -> str | None:
        """The name of the evaluation that belongs before the next step, unless it was played: a learner before may have been
        killed in it, and a batch that could not be trained asks again."""
        evaluation = self._configuration.evaluation
        name = f"step{self._step}" if self._step else "start"
        wanted = evaluation.every and self._step % evaluation.every == 0 if self._step else evaluation.episodes
        return name if wanted and name not in self._evaluated else None

    async def _finish(self) -> None:
        await when_there_is_room(self._ports, self._trainer.save_model, self._folder.model)
        if self._configuration.evaluation.episodes:
            await unless_drained(self._drain, self._evaluate_end)
        if self._drain.is_set():
            return
        await self._catch_up()
        self._pool.discard_all("training_finished")
        while True:
            excluded = tuple(self._pool.take_exclusions())
            await self._train.append(
                TrainingFinished(lineage=self._lineage, step=self._step, version=self._publication.version, excluded=excluded)
            )
            if len(excluded) < EXCLUSIONS_PER_ENTRY:
                break
        log.info("finished", model=str(self._folder.model))

    async def _catch_up(self) -> None:
        """Enter every result that stands in the log by now: whoever begins at the last step may not have read any yet."""
        async for stored in self._bus.scan([self._subjects.episodes], start=self._ledger.floor):
            entry = episode_entry(stored)
            if isinstance(entry, EpisodeFinished) and entry.split == "train":
                self._pool.finished(entry)

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
        evaluated = await self._evaluations.play(
            name, tasks, lineage=self._lineage, step=self._step, version=self._publication.version, temperature=temperature
        )
        self._counters["seconds_evaluate"] += anyio.current_time() - started
        log.info("evaluated", name=name, success=round(evaluated.success, 3), graded=evaluated.graded)
        await self._train.append(evaluated)
        self._evaluated.add(name)

    # Requests and results

    async def _follow_results(self) -> None:
        """Read results from the floor on, for ever; claims and goodbyes stand on the same subjects."""
        async with self._bus.read([self._subjects.episodes], start=self._beginning.floor) as reader:
            while True:
                entry = episode_entry(await reader.receive())
                if isinstance(entry, EpisodeFinished):
                    self._requests.answered(entry.episode_id)
                    self._counters["results"] += 1
                    if entry.split == "eval":
                        self._evaluations.finished(entry)
                    else:
                        self._pool.finished(entry)

    # One step

    async def _train_batch(self) -> None:
        waited = anyio.current_time()
        groups = await self._next_batch()
        if not groups:
            return
        read = anyio.current_time()
        sequences = await read_sequences(
            self._bus,
            self._subjects,
            groups,
            plan=CreditPlan.of(self._configuration),
            temperature=self._configuration.episode.temperature,
            archive=Path(self._settings.archive) if self._settings.archive else None,
            ports=self._ports,
            images=self._images,
        )
        if not (groups := self._pool.trainable(groups)):
            return
        trained = anyio.current_time()
        progress = self._step / self._settings.steps
        metrics = await self._ports.offload(
            self._trainer.train, sequences, version=self._publication.version, progress=progress
        )
        done = anyio.current_time()
        metrics |= self._measured(groups) | measure_advantages(sequences)
        metrics |= {"seconds_wait": read - waited, "seconds_read": trained - read, "seconds_train": done - trained}
        await self._record_step(groups, metrics)

    def _measured(self, groups: list[Group]) -> dict[str, float]:
        lags = [self._pool.lag(group, self._step) for group in groups]
        queued = [self._pool.queued(group, self._step) for group in groups]
        measured = measure_groups(groups, lags, queued, max_staleness=self._settings.max_staleness)
        if measured["groups_late"]:
            log.warning("late groups are trained", groups=measured["groups_late"], lag=max(lags), step=self._step)
        return measured

    async def _next_batch(self) -> list[Group]:
        """The groups of the next step; [] when drained while waiting."""
        while not self._drain.is_set():
            groups = self._pool.take(self._settings.groups, self._step)
            if groups:
                return groups
            if self._requests.full and self._unstored is not None:
                await self._store_checkpoint(self._unstored)  # the log is trimmed up to a checkpoint only
            with anyio.move_on_after(FULL_CHECK_SECONDS):
                await unless_drained(self._drain, self._pool.changed.wait)
        return []

    async def _record_step(self, groups: list[Group], metrics: dict[str, float]) -> None:
        """The step goes to the log before the version that it made; a checkpoint holds what the log says by then."""
        self._step += 1
        trained, excluded = self._pool.settle(groups)
        self._unstored = checkpoint = Checkpoint(
            lineage=self._lineage,
            step=self._step,
            version=self._publication.version + 1,
            floor=self._ledger.floor,
            settled=self._ledger.settled_above,
            next_group=self._admission.next_group,
        )
        self._ledger.forget_settled()
        done = StepTrained(
            lineage=self._lineage,
            step=self._step,
            version=self._publication.version + 1,
            episodes=tuple(trained),
            excluded=tuple(excluded),
            metrics={name: float(value) for name, value in metrics.items()},
        )
        await self._train.append(done)
        measured = {name: round(done.metrics[name], 3) for name in ("success", "reward") if name in done.metrics}
        log.info("trained", step=self._step, of=self._settings.steps, **measured)
        self._signal.trained(done, self._bus.now_ns())
        await self._publish_version()
        self._counters["steps"] += 1
        if self._step % self._settings.checkpoint_every == 0 or self._step == self._settings.steps or self._drain.is_set():
            await self._store_checkpoint(checkpoint)

    async def _publish_version(self) -> None:
        started = anyio.current_time()
        self._pool.published(await self._publication.publish(self._step), self._step)
        self._counters["seconds_publish"] += anyio.current_time() - started

    async def _store_checkpoint(self, checkpoint: Checkpoint) -> None:
        started = anyio.current_time()
        folder = self._folder.checkpoints.absolute()
        path: Path = await when_there_is_room(self._ports, write_checkpoint, folder, checkpoint, self._trainer)
        await self._train.append(
            CheckpointStored(
                lineage=checkpoint.lineage,
                step=checkpoint.step,
                version=checkpoint.version,
                file=str(path),
                floor=checkpoint.floor,
            )
        )
        await self._ports.offload(prune, folder, self._settings.keep_checkpoints, self._beginning.voids)
        self._unstored = None
        self._counters["seconds_checkpoint"] += anyio.current_time() - started

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            role="learner",
            worker=self._name,
            slots=self._settings.groups,
            in_flight=len(self._pool),
            policy_version=self._publication.version,
            draining=self._drain.is_set(),
            counters=dict(self._counters) | {"step": float(self._step)},
        )


def _replaceable(configuration: Configuration) -> int:
    """How many groups without signal a batch may replace."""
    algorithm = configuration.algorithm
    return algorithm.dynamic_sampling_batches * configuration.learner.groups if algorithm.dynamic_sampling else 0


async def run_learner(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    trainer: Trainer,
    curriculum: Curriculum,
    ports: Ports | None = None,
) -> None:
    """A learner from where the log says training stands to the last step."""
    subjects = Subjects(configuration.run.name)
    ports = ports or Ports()
    beginning = await find_beginning(bus, subjects, configuration.run.policy, ports=ports)
    if beginning.finished_step >= configuration.learner.steps:
        log.info("training is finished already", step=beginning.finished_step)
        return
    learner = Learner(
        bus,
        configuration=configuration,
        name=name,
        drain=drain,
        trainer=trainer,
        curriculum=curriculum,
        beginning=beginning,
        ports=ports,
    )
    await learner.run()
