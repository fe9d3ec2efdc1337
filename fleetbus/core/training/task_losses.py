"""Episodes that were asked for and not trained, by task: some tasks lose more than others. Pure.

What fails, times out or becomes stale leaves the batch and its baseline. Where that happens to slow or hard tasks more than to
others, the policy learns from another mix of tasks than it was given.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

import msgspec

from fleetbus_schemas import EpisodeFinished, Exclusion

MAX_TASKS = 4096
MAX_OPEN = 65_536
"""Tasks and unsettled episodes that are kept; what is beyond is left out of the count."""

LOST_SHARE = 0.25
FEWEST_EPISODES = 8
"""A task that has lost such a share of at least as many episodes is named."""

NAMED = 5


class TaskCount(msgspec.Struct, kw_only=True):
    """Of one task: episodes that were trained and lost, why they were lost, and the seconds that all of them took."""

    trained: int = 0
    lost: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def episodes(self) -> int:
        return self.trained + self.lost

    @property
    def lost_share(self) -> float:
        return self.lost / max(self.episodes, 1)


class TaskLosses:
    """The fold of one learner over its results and steps."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float]] = {}
        self._order: deque[str] = deque()
        self._tasks: defaultdict[str, TaskCount] = defaultdict(TaskCount)

    def record_result(self, result: EpisodeFinished) -> None:
        """An episode has ended; whether it is trained is said later."""
        if result.split != "train" or result.episode_id in self._open:
            return
        self._open[result.episode_id] = result.task_key, sum(result.timings.values())
        self._order.append(result.episode_id)
        while len(self._order) > MAX_OPEN:
            self._open.pop(self._order.popleft(), None)

    def record_step(self, trained: Iterable[str], excluded: Iterable[Exclusion]) -> None:
        """Enter what a step settled."""
        for episode in trained:
            if (count := self._settle(episode)) is not None:
                count.trained += 1
        for exclusion in excluded:
            if (count := self._settle(exclusion.episode_id)) is not None:
                count.lost += 1
                count.reasons[exclusion.reason] = count.reasons.get(exclusion.reason, 0) + 1

    @property
    def metrics(self) -> dict[str, float]:
        """``lost_share`` of all episodes so far, that of the task that lost the largest share (``lost_share_worst``), and the
        number of tasks that lose many (``tasks_losing``)."""
        lost, played = (sum(getattr(count, name) for count in self._tasks.values()) for name in ("lost", "episodes"))
        worst = self.list_worst()
        return {
            "lost_share": lost / max(played, 1),
            "lost_share_worst": worst[0][1].lost_share if worst else 0.0,
            "tasks_losing": float(len(worst)),
        }

    def list_worst(self) -> list[tuple[str, TaskCount]]:
        """Tasks that lose many of their episodes, the largest share first."""
        many = [(task, count) for task, count in self._tasks.items() if _loses_many(count)]
        return sorted(many, key=lambda each: (-each[1].lost_share, each[0]))

    def describe(self) -> str:
        """One line for a person, with the seconds that tells slow tasks from others; empty if no task loses many."""
        worst = self.list_worst()
        if not worst:
            return ""
        all_seconds = sum(count.seconds for count in self._tasks.values())
        mean = all_seconds / max(sum(count.episodes for count in self._tasks.values()), 1)
        named = [_describe(task, count) for task, count in worst[:NAMED]]
        return f"{len(worst)} tasks lose many episodes (all take {mean:.1f} s on average): {'; '.join(named)}"

    def _settle(self, episode: str) -> TaskCount | None:
        task, seconds = self._open.pop(episode, (None, 0.0))
        if task is None or (task not in self._tasks and len(self._tasks) >= MAX_TASKS):
            return None
        count = self._tasks[task]
        count.seconds += seconds
        return count


def _loses_many(count: TaskCount) -> bool:
    return count.episodes >= FEWEST_EPISODES and count.lost_share >= LOST_SHARE


def _describe(task: str, count: TaskCount) -> str:
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(count.reasons.items()))
    return f"{task} {count.lost} of {count.episodes} ({reasons}; {count.seconds / count.episodes:.1f} s each)"
