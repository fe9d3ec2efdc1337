"""The progress of a run, as a fold of its log and of heartbeats. Pure: time stands in the entries, or is an argument.

Above it are the displays; below it the entries that are read for them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from fleetbus.core.training.learning_signal import LearningSignal
from fleetbus.recording.episodes import keep_timings
from fleetbus_schemas import EpisodeFinished, EvaluationFinished, Message, PolicyPublished, StepTrained
from fleetbus_workers.observe.run.training_history import TrainingHistory
from fleetbus_workers.observe.run.worker_registry import WorkerRegistry

RATE_WINDOW_SECONDS = 10.0
"""Episodes and tokens per second are means over this long."""

RATE_WINDOW_EPISODES = 4096


class Progress:
    """The progress of a run of ``steps`` steps, for a person. ``keeps`` chooses the metrics of earlier steps to remember."""

    def __init__(self, steps: int, keeps: Callable[[str], bool] = lambda name: True, *, evaluation_episodes: int = 0) -> None:
        self.steps = steps
        self.evaluation_episodes = evaluation_episodes
        """The most episodes of one evaluation, if it is known."""
        self.evaluated = 0
        """Held-out episodes of the evaluations that are under way."""
        self.step = 0
        self.version = 0
        self.versions = 0
        """How many were published, also by lineages that were cut."""
        self.metrics: dict[str, float] = {}
        self.episodes = 0
        self.outcomes: Counter[str] = Counter()
        self.episode_seconds: Counter[str] = Counter()
        """By stage, of all episodes together."""
        self.training = TrainingHistory(keeps)
        self.signal = LearningSignal()
        self.worker_registry = WorkerRegistry()
        self.others: dict[str, Progress] = {}
        """Of the policies of seats that learners of their own train, by name."""
        self._recent: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_EPISODES)

    def apply(self, message: Message, time_ns: int) -> None:
        """Take in one entry of the log, stored at ``time_ns``."""
        self.signal.apply(message, time_ns)
        self.training.apply(message, time_ns)
        match message:
            case StepTrained():
                self.step, self.version, self.metrics = message.step, message.version, message.metrics
            case EvaluationFinished():
                self.evaluated = 0
            case PolicyPublished():
                self.version = message.version
                self.versions += 1
            case EpisodeFinished():
                self.episodes += 1
                self.evaluated += message.split == "eval"
                self.outcomes[message.outcome] += 1
                self.episode_seconds.update(keep_timings(message.timings))
                self._recent.append((time_ns, message.tokens))

    @property
    def is_finished(self) -> bool:
        """True once all learners have trained their last step."""
        return self.training.is_finished and all(each.is_finished for each in self.others.values())

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
