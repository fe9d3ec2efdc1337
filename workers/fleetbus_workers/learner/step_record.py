"""Tells the log of what was trained: the step, the version that it made, and a checkpoint when one is due, in this order.

A checkpoint holds what the log says by then; nothing that it settles is settled anywhere else.
"""

import anyio
import structlog
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import LearnerSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus.delivery.requests import Requests
from fleetbus_schemas import StepTrained
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.batch_metrics import SignalLog
from fleetbus_workers.learner.batch_training import TrainedBatch
from fleetbus_workers.learner.checkpoint_storage import CheckpointStorage
from fleetbus_workers.learner.checkpoints import Checkpoint
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.league import LearnerLeague
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.progress import Progress
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.token_records import TokenRecords

log = structlog.get_logger()


class StepRecord:
    """The steps of one lineage. It alone moves ``progress`` on."""

    def __init__(
        self,
        bus: Bus,
        appender: FencedAppender,
        ledger: Ledger,
        pool: GroupPool,
        requests: Requests,
        admission: Admission | JoinedRequests,
        publication: Publication,
        checkpoints: CheckpointStorage,
        progress: Progress,
        token_records: TokenRecords,
        league: LearnerLeague,
        *,
        settings: LearnerSettings,
        runtime: Runtime,
    ) -> None:
        self._bus = bus
        self._appender = appender
        self._ledger = ledger
        self._pool = pool
        self._requests = requests
        self._admission = admission
        self._publication = publication
        self._checkpoints = checkpoints
        self._progress = progress
        self._token_records = token_records
        self._league = league
        self._settings = settings
        self._runtime = runtime
        self._signal = SignalLog()

    async def record(self, batch: TrainedBatch, tasks: TaskGroup) -> None:
        """Store the step and what follows from it; a checkpoint may be finished in ``tasks``."""
        progress, version = self._progress, self._publication.version + 1
        results = (result for group in batch.groups for result in group.graded)
        await self._league.record(results, version, self._runtime.offload)
        progress.step += 1
        trained, excluded = self._pool.settle(batch.groups)
        self._checkpoints.pending = self._build_checkpoint(version)
        self._ledger.forget_settled()
        judged = {episode: batch.judged[episode] for episode in trained if episode in batch.judged}
        metrics = {**batch.metrics, **self._admission.metrics, **self._pool.losses.metrics, **self._league.metrics}
        record = await self._runtime.offload(
            self._token_records.write, progress.lineage, progress.step, batch.tokens, version=self._publication.version
        )
        done = StepTrained(
            lineage=progress.lineage,
            step=progress.step,
            version=version,
            episodes=tuple(trained),
            excluded=tuple(excluded),
            metrics={name: float(value) for name, value in metrics.items()},
            digests=tuple(batch.digests[episode] for episode in trained),
            rewards={episode: each.reward for episode, each in judged.items()},
            scores={episode: each.score for episode, each in judged.items() if each.score is not None},
            differences=tuple(batch.differences.get(episode, -1.0) for episode in trained) if batch.differences else (),
            token_record=record,
        )
        await self._appender.append(done)
        measured = {name: round(done.metrics[name], 3) for name in ("success", "reward") if name in done.metrics}
        log.info("trained", step=done.step, of=self._settings.steps, **measured)
        self._signal.record_step(done, self._bus.now_ns(), self._pool.losses)
        await self.publish_version()
        progress.counters["steps"] += 1
        due = done.step % self._settings.checkpoint_every == 0 or done.step == self._settings.steps
        if due or await self._requests.is_short_of_room():  # trimmed up to a checkpoint only, the log could fill meanwhile
            await self._checkpoints.start(tasks)

    async def publish_version(self) -> None:
        """Publish the weights as they are after the last step."""
        started, step = anyio.current_time(), self._progress.step
        self._league.add_version(self._publication.version + 1, step)
        self._pool.record_version(await self._publication.publish(step), step)
        self._progress.counters["seconds_publish"] += anyio.current_time() - started

    def _build_checkpoint(self, version: int) -> Checkpoint:
        return Checkpoint(
            lineage=self._progress.lineage,
            step=self._progress.step,
            version=version,
            floor=self._ledger.floor,
            settled=self._ledger.settled_above,
            next_group=self._admission.next_group,
            first_open_group=self._admission.first_open_group,
            meetings=self._league.meetings,
            baselines=dict(self._publication.baselines),
        )
