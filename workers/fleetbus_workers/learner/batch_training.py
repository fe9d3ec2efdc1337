"""Trains one batch: its groups are graded together, their sequences read from the log, and given to the trainer.

Nothing is stored here: a batch that was trained is told to the log by `fleetbus_workers.learner.step_record`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration
from fleetbus.core.training.groups import Group
from fleetbus_schemas import Subjects
from fleetbus_workers.images.reader import image_reader
from fleetbus_workers.learner.base import MeasuresEpisodes, SequenceTokens, TracesTokens, Trainer
from fleetbus_workers.learner.batch_metrics import compute_advantage_metrics, measure_groups
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.group_judge import GroupJudge, JudgedReward
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.training_digest import train_with_digests


class TrainedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """``digests``, ``judged`` and ``differences`` are by episode; judged are the rewards that the judge of groups changed,
    differences are `MeasuresEpisodes.differences`. ``tokens`` are `TracesTokens.traced_tokens`."""

    groups: list[Group]
    metrics: dict[str, float]
    digests: dict[str, bytes]
    judged: dict[str, JudgedReward]
    differences: Mapping[str, float]
    tokens: Sequence[SequenceTokens]


class BatchTraining:
    """The batches of one learner, one at a time."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        pool: GroupPool,
        judge: GroupJudge,
        trainer: Trainer,
        runtime: Runtime,
        *,
        configuration: Configuration,
        drain: anyio.Event,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._pool = pool
        self._judge = judge
        self._trainer = trainer
        self._runtime = runtime
        self._configuration = configuration
        self._drain = drain
        self._images = image_reader(bus, configuration.run.name)

    async def train(self, groups: list[Group], *, step: int, version: int, waited: float) -> TrainedBatch | None:
        """Train ``groups`` after ``step`` steps with the weights of ``version``; None if none of them can be trained, or when
        drained before. ``waited``: since when a batch was waited for."""
        judged = await self._judge.grade(groups, self._drain)
        if not (groups := self._pool.discard_ungraded(groups)) or self._drain.is_set():
            return None
        read = anyio.current_time()
        settings = self._configuration.learner
        sequences = await read_sequences(
            self._bus,
            self._subjects,
            groups,
            plan=CreditPlan.from_configuration(self._configuration),
            temperature=self._configuration.episode.temperature,
            archive=Path(settings.archive) if settings.archive else None,
            runtime=self._runtime,
            images=self._images,
            trainer=self._trainer,
        )
        if not (groups := self._pool.discard_ungraded(groups)):
            return None
        trained = anyio.current_time()
        digests, metrics = await self._runtime.offload(
            train_with_digests, self._trainer, sequences, version=version, progress=step / settings.steps
        )
        done = anyio.current_time()
        metrics |= compute_advantage_metrics(sequences) | self._measure(groups, step)
        metrics |= {"seconds_wait": read - waited, "seconds_read": trained - read, "seconds_train": done - trained}
        differences = self._trainer.differences if isinstance(self._trainer, MeasuresEpisodes) else {}
        tokens = self._trainer.traced_tokens if isinstance(self._trainer, TracesTokens) else ()
        return TrainedBatch(
            groups=groups, metrics=metrics, digests=digests, judged=judged, differences=differences, tokens=tokens
        )

    def _measure(self, groups: list[Group], step: int) -> dict[str, float]:
        return measure_groups(
            groups,
            self._pool,
            step=step,
            max_staleness=self._configuration.learner.max_staleness,
            success_threshold=self._configuration.evaluation.success_threshold,
        )
