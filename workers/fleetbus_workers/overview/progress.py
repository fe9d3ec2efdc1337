"""How a run stands, as a fold of its log and of heartbeats. Pure: time stands in the entries, or is an argument.

Above it are the displays; below it the entries that are read for them.
"""

from __future__ import annotations

from collections import Counter, deque

from fleetbus.core.learning_signal import LearningSignal
from fleetbus_schemas import (
    EpisodeFinished,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
)
from fleetbus_schemas.stored import STORED
from fleetbus_workers.overview.worker_registry import WorkerRegistry

FOLLOWED = STORED["train"] + STORED["episode"] + STORED["policy"] + STORED["life"]
"""Every message on the subjects that are followed to know how a run stands."""

RATE_WINDOW_SECONDS = 10.0
"""Episodes and tokens per second are means over this long."""

RATE_WINDOW_EPISODES = 4096


class Progress:
    """What a person wants to see of a run of ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.evaluations: dict[str, EvaluationFinished] = {}
        self.episodes = 0
        self.outcomes: Counter[str] = Counter()
        self.signal = LearningSignal()
        self.worker_registry = WorkerRegistry()
        self.excluded: Counter[str] = Counter()
        """Episodes that were settled untrained, by reason, without those of lineages that were cut."""
        self._excluded_at: dict[int, Counter[str]] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_EPISODES)

    def apply(self, message: Message, time_ns: int) -> None:
        """Take in one entry of the log, stored at ``time_ns``."""
        self.signal.apply(message, time_ns)
        match message:
            case LineageStarted():
                for step in [step for step in self._excluded_at if step > message.parent_step]:
                    self.excluded -= self._excluded_at.pop(step)
            case StepTrained():
                self.step, self.version, self.metrics = message.step, message.version, message.metrics
                if message.excluded:
                    self._excluded_at[message.step] = counted = Counter(exclusion.reason for exclusion in message.excluded)
                    self.excluded += counted
            case EvaluationFinished():
                self.evaluations[message.name] = message
            case PolicyPublished():
                self.version = message.version
            case EpisodeFinished():
                self._apply_result(message, time_ns)

    def rates(self) -> tuple[float, float]:
        """Episodes and tokens per second up to the last episode that finished; 0 until there are two."""
        if len(self._recent) < 2:
            return 0.0, 0.0
        newest = self._recent[-1][0]
        within = [(time, tokens) for time, tokens in self._recent if newest - time <= RATE_WINDOW_SECONDS * 1e9]
        if len(within) < len(self._recent):  # something finished before the window, so all of the window is known
            return len(within) / RATE_WINDOW_SECONDS, sum(tokens for _, tokens in within) / RATE_WINDOW_SECONDS
        seconds = (newest - within[0][0]) / 1e9
        if seconds <= 0:
            return 0.0, 0.0
        return (len(within) - 1) / seconds, sum(tokens for _, tokens in within[1:]) / seconds

    def _apply_result(self, message: EpisodeFinished, time_ns: int) -> None:
        self.episodes += 1
        self.outcomes[message.outcome] += 1
        self._recent.append((time_ns, message.tokens))
