"""Begins a lineage: the trainer is restored, the lineage announced, and the requests that are open taken over."""

from pathlib import Path

import structlog

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.pools import list_pools
from fleetbus.config.settings import Configuration
from fleetbus.delivery.requests import Requests
from fleetbus.errors import UserError
from fleetbus.log.floor import fence_floor
from fleetbus_schemas import LineageStarted, Subjects
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.changed_settings import list_changed_settings
from fleetbus_workers.learner.checkpoint_storage import CheckpointStorage
from fleetbus_workers.learner.checkpoints import WrittenCheckpoint, find_origin, hash_index, is_there
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.league import LearnerLeague
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.resume import ResumePoint, read_requests_from_floor, select_lineage_settings

log = structlog.get_logger()


class CheckpointRemoved(FileNotFoundError):
    """By a learner that has not heard of this one yet, and kept no more of them than it may. The next start finds another."""


class LineageStart:
    """The beginning of the lineage that a `ResumePoint` describes."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        resume_point: ResumePoint,
        trainer: Trainer,
        runtime: Runtime,
        *,
        appender: FencedAppender,
        publication: Publication,
        checkpoints: CheckpointStorage,
        pool: GroupPool,
        requests: Requests,
        admission: Admission | JoinedRequests,
        judge: GroupJudge,
        league: LearnerLeague,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._resume_point = resume_point
        self._trainer = trainer
        self._runtime = runtime
        self._appender = appender
        self._publication = publication
        self._checkpoints = checkpoints
        self._pool = pool
        self._requests = requests
        self._admission = admission
        self._judge = judge
        self._league = league

    async def _restore(self, folder: Path) -> None:
        try:
            await self._runtime.offload(self._trainer.restore, folder)
        except (FileNotFoundError, UserError) as error:  # what is chosen of a run was whole a moment ago
            if self._resume_point.checkpoint_path is None or await self._runtime.offload(is_there, folder):
                raise
            raise CheckpointRemoved(
                f"checkpoint {folder} was removed while it was read, by a learner that is still at work: start this one again"
            ) from error

    async def run(self, configuration: Configuration, *, worker: str) -> None:
        """Return when every earlier learner is refused and its open requests are this lineage's."""
        point = self._resume_point
        begin = point.checkpoint_path or await self._runtime.offload(find_origin, configuration.learner.begin_with)
        if begin is not None:
            await self._restore(begin)
        started = LineageStarted(
            lineage=point.lineage,
            worker=worker,
            parent=point.parent,
            parent_step=point.step,
            floor=point.floor,
            seed=configuration.run.seed,
            nonce=self._runtime.nonce(),
            settings=select_lineage_settings(configuration) | {"group_judge": {"weight": self._judge.weight}},
            restart=point.restart,
        )
        if point.unrecorded and point.checkpoint is not None and point.checkpoint_path is not None:
            index_sha256 = await self._runtime.offload(hash_index, point.checkpoint_path)
            await self._checkpoints.announce(point.checkpoint, WrittenCheckpoint(point.checkpoint_path, index_sha256))
        await self._appender.append(started)
        floor = await fence_floor(self._bus, self._subjects)
        versions = await self._publication.fence(started)
        log.info("lineage started", lineage=point.lineage, parent=point.parent, step=point.step)
        if changed := list_changed_settings(point.settings_before, started.settings):
            log.warning("settings differ from those of the lineage before", lineage=point.lineage, changed=changed)
        # What no window kept has no file any more, whatever leagues there are now.
        kept_from = max((version + 1 - made.window for version, made in versions.items()), default=0)
        for version, made in versions.items():
            self._pool.record_version(version, made.step)
            if version >= kept_from and not point.is_voided(made.lineage, made.step):
                self._league.add_version(version, made.step)
        run = configuration.run
        requests = await read_requests_from_floor(self._bus, self._subjects, run.policy, list_pools(run), point)
        await self._requests.assume_size(len(requests))
        await self._admission.take_over(requests, floor.groups.get(run.policy, 0))
