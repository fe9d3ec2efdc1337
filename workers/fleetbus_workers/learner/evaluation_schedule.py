"""Schedules held-out tasks: before training, every so many steps, and at the end. Below is `Evaluations`."""

from collections.abc import Iterable

import anyio
import structlog

from fleetbus.config.settings import Configuration
from fleetbus_workers.learner.batch_metrics import round_shares
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.progress import Progress
from fleetbus_workers.learner.publication import Publication

log = structlog.get_logger()


class EvaluationSchedule:
    """``evaluated`` are the names of evaluations that count already."""

    def __init__(
        self,
        evaluations: Evaluations,
        curriculum: Curriculum,
        publication: Publication,
        appender: FencedAppender,
        progress: Progress,
        *,
        configuration: Configuration,
        evaluated: Iterable[str],
    ) -> None:
        self._evaluations = evaluations
        self._curriculum = curriculum
        self._publication = publication
        self._appender = appender
        self._progress = progress
        self._settings = configuration.evaluation
        self._temperature = configuration.episode.temperature
        self._evaluated = set(evaluated)

    @property
    def is_due(self) -> bool:
        """True if an evaluation belongs before the next step and was not played: a learner before may have been killed in it,
        and a batch that could not be trained asks again."""
        step = self._progress.step
        wanted = self._settings.every and step % self._settings.every == 0 if step else self._settings.episodes
        return bool(wanted) and self._due_name not in self._evaluated

    @property
    def _due_name(self) -> str:
        return f"step{self._progress.step}" if self._progress.step else "start"

    async def play_due(self) -> None:
        """Play the evaluation that belongs before the next step."""
        await self._play(self._due_name, self._temperature)
        if not self._progress.step and self._settings.greedy_start:
            await self._play("start_greedy", 0.0)

    async def play_end(self) -> None:
        """Play those that belong after the last step, at once."""
        if not self._settings.episodes:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._play, "end", self._temperature)
            if self._settings.greedy:
                group.start_soon(self._play, "end_greedy", 0.0)

    async def _play(self, name: str, temperature: float) -> None:
        started, progress = anyio.current_time(), self._progress
        tasks = self._curriculum.evaluation(self._settings.episodes)
        if not tasks:
            return
        self._evaluated.add(name)
        evaluated = await self._evaluations.play(
            name,
            tasks,
            lineage=progress.lineage,
            step=progress.step,
            version=self._publication.version,
            temperature=temperature,
            opponents={seat: first.version for seat, first in self._publication.baselines.items()},
        )
        progress.counters["seconds_evaluate"] += anyio.current_time() - started
        if evaluated is None:  # a step makes room, and stands behind this
            log.warning("log has no room for an evaluation; leaving it out", name=name, step=progress.step)
            return
        log.info("evaluated", name=name, graded=evaluated.graded, **round_shares(evaluated))
        await self._appender.append(evaluated)
