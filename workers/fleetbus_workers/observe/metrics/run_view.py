"""A run at one moment: what the readers of metrics read. Pure; what several of them need is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fleetbus.recording.episodes import EpisodeRow
from fleetbus_schemas import GRADED
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.policies import PolicyRow, list_seat_policies
from fleetbus_workers.observe.run.pools import PoolRow, count_pools
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RECENT_EPISODES, OpenEpisodes, RunState
from fleetbus_workers.observe.run.termination import Termination
from fleetbus_workers.observe.run.watchdog import Stall
from fleetbus_workers.observe.run.worker_registry import WorkerRow

QUIET_SECONDS = 15
"""A log that stores nothing for longer has rates of 0."""


@dataclass(eq=False)
class RunView:
    """The fold of a run, its log and its server, at ``now`` (monotonic seconds) and ``now_ns`` (the server's time).
    ``termination`` is that of a run that is over."""

    state: RunState
    health: LogHealth = field(default_factory=LogHealth)
    server: ServerView = field(default_factory=ServerView)
    stalls: Sequence[Stall] = ()
    now: float = 0.0
    now_ns: int = 0
    termination: Termination | None = None

    @cached_property
    def recent(self) -> list[EpisodeRow]:
        """The newest episodes."""
        return list(self.state.episodes.rows.values())[-RECENT_EPISODES:]

    @cached_property
    def graded(self) -> list[EpisodeRow]:
        """Those of them that have a grade."""
        return [row for row in self.recent if row.outcome in GRADED and row.reward is not None]

    @cached_property
    def open(self) -> OpenEpisodes:
        """Episodes without a result."""
        return self.state.count_open()

    @cached_property
    def workers(self) -> list[WorkerRow]:
        """Workers as the tables show them."""
        return self.state.worker_registry.rows(self.now)

    @cached_property
    def pools(self) -> list[PoolRow]:
        """Pools of environment workers."""
        return count_pools(self.state, self.workers)

    @cached_property
    def seat_policies(self) -> list[PolicyRow]:
        """Policies beside the run's own."""
        return list_seat_policies(self.state, self.workers)

    @cached_property
    def step(self) -> dict[str, float]:
        """The metrics of the last step of the training that counts; empty before the first one."""
        points = self.state.training.steps
        return points[-1].metrics if points else {}

    @property
    def quiet_seconds(self) -> float:
        """Since the newest entry; 0 before the first one."""
        return (self.now_ns - self.state.last_time_ns) / 1e9 if self.state.last_time_ns else 0.0

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Episodes and tokens per second."""
        return (0.0, 0.0) if self.quiet_seconds > QUIET_SECONDS else self.state.progress.rates()
