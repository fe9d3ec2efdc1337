"""The state of a run that the page shows: a fold of its log and of heartbeats. Pure: time stands in the entries or arguments.

Shares the rows of episodes with ``fleetbus episodes`` and the rates with ``fleetbus up``. Above it are the routes, below it the
entries that `fleetbus_workers.observe.run.run_observer` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.algorithms.means import compute_mean, compute_spread
from fleetbus.core.audit.operations import Operations
from fleetbus.core.training.joined_policies import JoinedPolicies
from fleetbus.recording.episodes import EpisodeIndex, EpisodeRow
from fleetbus_schemas import (
    GRADED,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeLabeled,
    EpisodeRequested,
    LineageStarted,
    Message,
    OperationRecorded,
    StepTrained,
)
from fleetbus_schemas.names import is_name
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.observe.run.league_table import LeagueTable
from fleetbus_workers.observe.run.own_reward import show_own_reward
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.observe.run.termination import TerminationState
from fleetbus_workers.observe.run.training_history import TrainingHistory

KEPT_EPISODES = 50_000
"""Older rows are forgotten; the log still has them."""

RECENT_EPISODES = 500
"""Outcomes and errors are counted over all episodes, means over this many."""

MOST_ERROR_CLASSES = 1_024
"""With more, the rarer half is forgotten: results name what they like."""

ERROR_CLASS_CHARACTERS = 64
"""A longer one is counted by its beginning."""


class OpenEpisodes(NamedTuple):
    """Episodes without a result, and when the oldest of them was requested; 0 if there is none."""

    waiting: int
    running: int
    oldest_ns: int


class GroupRow(msgspec.Struct, kw_only=True):
    """One GRPO group. ``spread`` is the standard deviation of its rewards: 0 teaches nothing."""

    group_id: str
    task_key: str
    episodes: int = 0
    graded: int = 0
    open: int = 0
    rewards: list[float | None] = msgspec.field(default_factory=list)
    ids: list[str] = msgspec.field(default_factory=list)
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    trained_in: int = 0
    mean: float | None = None
    spread: float | None = None


class RunState:
    """The fold. `apply` takes entries in the order of the log."""

    def __init__(self, steps: int, *, kept_episodes: int = KEPT_EPISODES, joined: Iterable[str] = ()) -> None:
        self.joined = JoinedPolicies(joined)
        self._kept_episodes = kept_episodes
        self.progress = Progress(steps)
        self.worker_registry = self.progress.worker_registry
        self.termination_state = TerminationState()
        self.episodes = EpisodeIndex()
        self.trained_in: dict[str, int] = {}
        self.requested = 0
        self.last_time_ns = 0
        self.last_progress_ns = 0
        self.takeovers = 0
        self.errors: Counter[str] = Counter()
        self.segments: Counter[str] = Counter()
        """Segments that finished episodes began beside their first, by reason."""
        self.turns = 0
        self.prompts = 0
        """Contexts that the turns of finished episodes are in; fewer than turns where one continues another."""
        self.lineage_ns = 0
        """When the newest lineage began."""
        self.last_step_ns = 0
        self.since_step: Counter[str] = Counter()
        """Training episodes by outcome since the last step, or since the lineage began."""
        self.groups_since_step: set[str] = set()
        """The groups that they are of, where there is a learner to take them."""
        self.malformed = 0
        self.operations = Operations()
        self.league = LeagueTable()
        self.checkpoint = 0
        self.policy = ""
        """The name of the run's own policy, once its training has begun."""
        self.others: dict[str, TrainingHistory] = {}
        """The training of each policy whose learner joined, by its name; the reward of a step is that of its own seats."""
        self.seat_policies: set[str] = set()
        """Other policies that requests name for seats."""
        self.history = 0
        """Counts the times that the curves lost points: a view has to draw them again."""
        self._claimed: set[str] = set()

    # Folding

    def apply(self, entry: StreamEntry, message: Message, now: float, now_ns: int) -> None:
        """Take in an entry; ``now`` is monotonic seconds, ``now_ns`` the server's time."""
        if isinstance(message, EpisodeLabeled):  # no news of the run: people label what is over
            self.episodes.apply(entry, message)
            return
        if isinstance(message, OperationRecorded):  # nor is that somebody wants something of it
            self.operations.apply(message, entry.sequence, entry.subject, entry.time_ns)
            return
        self.last_time_ns = max(self.last_time_ns, entry.time_ns)
        if self.joined.covers(entry.subject, message):
            self._apply_joined(message, entry)
            return
        self.progress.apply(message, entry.time_ns)
        self.worker_registry.record_life_event(message, (now_ns - entry.time_ns) / 1e9, now)
        self.episodes.apply(entry, message)
        self.termination_state.apply(message, entry.time_ns)
        _, _, kind, *names = entry.subject.split(".")
        if kind == "train":
            self.policy = names[-1]
        match message:
            case EpisodeRequested():
                if len(self.seat_policies) < MAX_SEATS:
                    self.seat_policies.update(filter(is_name, (seat.policy for seat in message.seats[:MAX_SEATS])))
            case AttemptStarted():
                self._claimed.add(names[-1])
                self.takeovers += message.reason == "taken_over"
            case EpisodeFinished():
                self._apply_result(message, entry)
            case StepTrained():
                self._apply_step(message, entry)
            case LineageStarted() if kind == "train":
                self.lineage_ns = entry.time_ns
                self._reset_step_counters()
                self.history += 1
            case CheckpointStored():
                self.checkpoint = message.step
        self.requested += kind == "task"
        self._prune_settled()

    def take_over(self, recent: RunState) -> None:
        """Take the place of a fold of the newest entries, which alone was shown so far: heartbeats went to that one."""
        self.worker_registry.take_over(recent.worker_registry)
        self.history += recent.history + 1

    def _apply_joined(self, message: Message, entry: StreamEntry) -> None:
        _, _, kind, policy = entry.subject.split(".", 3)
        if kind == "train":
            self.others.setdefault(policy, TrainingHistory()).apply(show_own_reward(message), entry.time_ns)
            self.history += isinstance(message, LineageStarted)

    def _apply_result(self, message: EpisodeFinished, entry: StreamEntry) -> None:
        self.last_progress_ns = entry.time_ns
        if message.split == "train":
            self.since_step[message.outcome] += 1
            if self.lineage_ns and len(self.groups_since_step) < KEPT_EPISODES:
                self.groups_since_step.add(message.group_id)
        if message.error_class:
            self.errors[message.error_class[:ERROR_CLASS_CHARACTERS]] += 1
            if len(self.errors) > MOST_ERROR_CLASSES:
                self.errors = Counter(dict(self.errors.most_common(MOST_ERROR_CLASSES // 2)))
        self.segments.update(segment.origin.reason for segment in message.segments if segment.origin is not None)
        self.league.apply(message)
        self.turns += message.turns
        self.prompts += max(len(message.segments), min(message.turns, 1))

    def _apply_step(self, message: StepTrained, entry: StreamEntry) -> None:
        self.last_progress_ns = self.last_step_ns = entry.time_ns
        self._reset_step_counters()
        rows = self.episodes.rows
        self.trained_in.update((episode, message.step) for episode in message.episodes if episode in rows)

    def _reset_step_counters(self) -> None:
        self.since_step.clear()
        self.groups_since_step.clear()

    def _prune_settled(self) -> None:
        rows = self.episodes.rows
        if len(rows) <= self._kept_episodes + 1_000:
            return
        for episode in list(rows)[: len(rows) - self._kept_episodes]:
            self.episodes.forget(episode)
            self.trained_in.pop(episode, None)
            self._claimed.discard(episode)

    @property
    def training(self) -> TrainingHistory:
        """The steps and evaluations that count."""
        return self.progress.training

    def compute_stuck_seconds(self, now_ns: int, oldest_open_ns: int) -> float:
        """Since the last progress, the beginning of the lineage, or the request of what has been open the longest, whichever
        came last; 0 if there is nothing to wait for."""
        if not oldest_open_ns and not self.lineage_ns:
            return 0.0
        since = max(self.last_progress_ns, self.lineage_ns, oldest_open_ns)
        return max(now_ns - since, 0) / 1e9 if since else 0.0

    def describe_state(self, row: EpisodeRow) -> str:
        """Its outcome, or how far it is."""
        return row.outcome or ("running" if row.episode_id in self._claimed else "waiting")

    def count_open(self) -> OpenEpisodes:
        """Episodes without a result."""
        waiting = running = oldest = 0
        for row in self.episodes.rows.values():
            if row.outcome:
                continue
            if row.episode_id in self._claimed:
                running += 1
            else:
                waiting += 1
            if row.requested_ns and (not oldest or row.requested_ns < oldest):
                oldest = row.requested_ns
        return OpenEpisodes(waiting, running, oldest)

    def groups(self, rows: Iterable[EpisodeRow] | None = None) -> list[GroupRow]:
        """Training groups in the order of their requests."""
        groups: dict[str, GroupRow] = {}
        for row in self.episodes.rows.values() if rows is None else rows:
            if row.split != "train" or not row.group_id:
                continue
            group = groups.setdefault(row.group_id, GroupRow(group_id=row.group_id, task_key=row.task_key))
            group.episodes += 1
            group.ids.append(row.episode_id)
            state = self.describe_state(row)
            group.outcomes[state] = group.outcomes.get(state, 0) + 1
            is_graded = row.outcome in GRADED
            group.rewards.append(row.reward if is_graded else None)
            group.graded += is_graded
            group.open += not row.outcome
            group.trained_in = max(group.trained_in, self.trained_in.get(row.episode_id, 0))
        for group in groups.values():
            rewards = [reward for reward in group.rewards if reward is not None]
            group.mean, group.spread = compute_mean(rewards), compute_spread(rewards)
        return list(groups.values())
