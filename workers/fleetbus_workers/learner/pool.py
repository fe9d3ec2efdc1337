"""Groups between their request and their batch: which are out, which are ready, which must be discarded.

The worker feeds results in and takes batches out. Everything here is bounded by the admission rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import anyio
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.reward_components import MAX_ABS_REWARD, find_reward_problem, list_all_rewards
from fleetbus.core.episode.claim_seals import NOT_OF_CLAIM
from fleetbus.core.training.capacity import lag
from fleetbus.core.training.groups import Group
from fleetbus.core.training.ledger import Ledger
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus.core.training.rewarded_parts import has_no_signal, list_rewards
from fleetbus.core.training.task_losses import TaskLosses
from fleetbus_schemas import EpisodeFinished, Exclusion

EXCLUSIONS_PER_ENTRY = 16_384
"""Exclusions that fit into one journal entry; a message holds some 40,000. The groups beyond it wait for the next one,
unsettled until then: a group is settled by one entry, because a learner cannot resume from half of one."""

LONGEST_PAUSE_SECONDS = 60.0


class GroupPool:
    """Admitted groups by id. ``settled`` decides what counts; results of unknown episodes are ignored.

    ``stale_groups`` says what becomes of groups beyond ``max_staleness``: "drop" discards them, "keep" trains them, "wait"
    takes no batch that would make an unfinished group late. ``replace_flat``: so many groups with equal rewards are discarded
    per batch (dynamic sampling), further ones are trained, so that a task without any signal ends all the same; and so are all
    while ``is_log_full``, for what is discarded leaves the log only after the next step. ``policy``: see `select_own_seats`.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        minimum: int,
        max_staleness: int,
        stale_groups: Literal["drop", "keep", "wait"] = "drop",
        replace_flat: int = 0,
        max_abs_reward: float = MAX_ABS_REWARD,
        policy: str = "",
        is_log_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_log_full = is_log_full
        self._policy = policy
        self._max_abs_reward = max_abs_reward
        self._ledger = ledger
        self._minimum = minimum
        self._max_staleness = max_staleness
        self._late = stale_groups
        self._replace_flat = replace_flat
        self._replaced_count = 0
        self._failures = 0
        self._untrainable = 0
        """Groups that were ready and could not be trained after all, since one was trained."""
        self.losses = TaskLosses()
        self._start_steps: dict[str, int] = {}
        self._completion_steps: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        self._excluded: deque[list[Exclusion]] = deque()
        """By group, what no entry has recorded yet."""
        self._step_of: dict[int, int] = {}
        self.published_step = -1
        """Steps behind the version that was published last."""
        self.changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, group_id: str, size: int, *, version: int | None = None) -> Group:
        """Enter a group of which ``size`` episodes are requested, begun with ``version`` (None: with the newest)."""
        self._start_steps.setdefault(group_id, self.published_step if version is None else self._step_of.get(version, 0))
        return self._groups.setdefault(group_id, Group(group_id=group_id, size=size))

    @property
    def open_episodes(self) -> int:
        """Episodes that were asked for and have no result."""
        return sum(max(group.size - len(group.results), 0) for group in self._groups.values())

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Groups that are requested or ready."""
        return tuple(self._groups)

    def list_unanswered(self, group_id: str) -> dict[str, int]:
        """A group's episodes without a result, and the deadlines of their requests (ns), as far as these are known."""
        if (group := self._groups.get(group_id)) is None:
            return {}
        return {
            episode_id: deadline_ns for episode_id, deadline_ns in group.deadlines_ns.items() if episode_id not in group.results
        }

    def size(self, group_id: str) -> int:
        """Episodes that the group is to have."""
        return self._groups[group_id].size

    def record_version(self, version: int, step: int) -> None:
        """A version is the weights after ``step`` steps; versions of a lineage that was cut keep theirs."""
        self._step_of[version] = self.published_step = step
        self.notify()

    def lag(self, group: Group, step: int) -> int:
        """Steps between the oldest weights that sampled the group and those of ``step``."""
        return lag(step, tuple(self._step_of.get(version, 0) for version in group.versions))

    def steps_queued(self, group: Group, step: int) -> int:
        """The part of `lag` that passed after the group was complete; the rest passed while it was played."""
        return min(self.lag(group, step), step - self._completion_steps.get(group.group_id, step))

    def expect(self, episode_id: str, group_id: str, deadline_ns: int = 0) -> None:
        """Enter an episode of an admitted group before its request is stored: its result may be read first."""
        self._group_of[episode_id] = group_id
        if deadline_ns:
            self._groups[group_id].deadlines_ns[episode_id] = deadline_ns
        self._ledger.register_pending(episode_id)

    def record_deadline(self, episode_id: str, deadline_ns: int) -> None:
        """The deadline with which the episode's request stands in the log: records name the episode's trace by it."""
        group = self._groups.get(self._group_of.get(episode_id, ""))
        if group is not None:
            group.deadlines_ns[episode_id] = deadline_ns

    def expects(self, episode_id: str) -> bool:
        """True for an episode that was entered and is not settled."""
        return episode_id in self._group_of

    def register_request(self, episode_id: str, sequence: int) -> bool:
        """The episode's request stands at this position of the log; False if it is settled or known already."""
        return self._ledger.register(episode_id, sequence)

    def record_settlement(self, episode_id: str, group_id: str) -> None:
        """An episode of an admitted group was settled by an earlier lineage: no batch can use the others, which are excluded
        once their results are there."""
        group = self._groups[group_id]
        group.cut()
        self._ledger.withdraw(episode_id)
        self._group_of.pop(episode_id, None)
        self._complete(group)

    def add_result(self, result: EpisodeFinished, sequence: int, *, is_of_claim: bool = True) -> None:
        """Add the result that stands at position ``sequence`` of the log, which may be delivered twice; a group that can no
        longer fill a batch is discarded with reasons. ``is_of_claim``: the process that held the episode stored it."""
        group = self._groups.get(self._group_of.get(result.episode_id, ""))
        if group is None or result.episode_id in group.results:
            return
        result = select_own_seats(result, self._policy)
        requested = self._ledger.register_result(result.episode_id, result.request_sequence, sequence)
        group.add(msgspec.structs.replace(result, request_sequence=requested))
        self.losses.record_result(result)
        if problem := find_reward_problem(list_all_rewards(result), self._max_abs_reward):  # one spoils the batch
            group.unusable[result.episode_id] = problem
        if not is_of_claim or result.error_class == NOT_OF_CLAIM:  # read back without its verdict
            group.unusable[result.episode_id] = NOT_OF_CLAIM
        self._complete(group)

    def _complete(self, group: Group) -> None:
        if group.complete:
            self._completion_steps.setdefault(group.group_id, self.published_step)
            self._discard_if_useless(group)
        self.notify()

    def pause_seconds(self, round_size: int) -> float:
        """Seconds to wait before the next group is asked for: 0 unless one round after the other of ``round_size`` groups
        failed, or could not be trained. What the environments depend on is down then, or engines sample what the trainer
        cannot take, and failures would fill the log."""
        rounds = min(max(self._failures, self._untrainable) // round_size, 10)
        return min(2.0 ** (rounds - 1), LONGEST_PAUSE_SECONDS) if rounds else 0.0

    def _discard_if_useless(self, group: Group) -> None:
        """Discard a complete group that no batch can use."""
        too_small = len(group.graded) < self._minimum
        self._failures = self._failures + 1 if too_small else 0
        if too_small:
            self._discard(group, "group_too_small")
        elif self._may_replace and has_no_signal(map(list_rewards, group.graded)):
            self._replaced_count += 1
            self._discard(group, "no_signal")

    @property
    def _may_replace(self) -> bool:
        return self._replaced_count < self._replace_flat and not self._is_log_full()

    def take(self, count: int, step: int) -> list[Group]:
        """``count`` complete groups to train after ``step`` steps, oldest weights first; [] while there are too few.

        Groups beyond the staleness bound are discarded first, kept, or waited for before they are late, as configured.
        """
        ready = [group for group in self._groups.values() if group.complete]
        if self._late == "drop":
            for group in [group for group in ready if self.lag(group, step) > self._max_staleness]:
                self._discard(group, "stale")
                ready.remove(group)
        if len(ready) < count or (self._late == "wait" and self._would_exceed_staleness(count, step)):
            return []
        ready.sort(key=lambda group: (-self.lag(group, step), group.group_id))
        return ready[:count]

    def _would_exceed_staleness(self, count: int, step: int) -> bool:
        """True if a group that is still played would be beyond the bound in the batch after this one, and has a place in it."""
        due = [group for group in self._groups.values() if step - self._start_steps[group.group_id] >= self._max_staleness]
        complete = sum(group.complete for group in due)
        return complete < len(due) and complete < count

    def settle(self, groups: list[Group]) -> tuple[list[str], list[Exclusion]]:
        """The groups are trained: ids that were, what these groups leave out, and what was excluded since the last call as far
        as one entry can tell."""
        trained = [result.episode_id for group in groups for result in group.graded]
        self._excluded.appendleft([exclusion for group in groups for exclusion in group.excluded])
        for episode_id in trained:
            self._settle(episode_id)
        excluded = self.take_exclusions()
        self.losses.record_step(trained, excluded)
        for group in groups:
            self._remove(group)
        self._replaced_count = self._untrainable = 0
        self.notify()
        return trained, excluded

    def discard_ungraded(self, groups: list[Group]) -> list[Group]:
        """Those that still have an episode to train. The others are discarded, each episode for its own reason."""
        for group in [group for group in groups if not group.graded]:
            self._untrainable += 1
            self._discard(group, "group_too_small")
        return [group for group in groups if group.graded]

    def discard_all(self, reason: str) -> None:
        """Nothing more will be trained: what is complete is excluded for that reason."""
        for group in [group for group in self._groups.values() if group.complete]:
            self._discard(group, reason)

    @property
    def has_exclusions(self) -> bool:
        """True while something was excluded that no entry has recorded yet."""
        return bool(self._excluded)

    def take_exclusions(self) -> list[Exclusion]:
        """Take what was excluded and not recorded yet, as many whole groups as one entry can hold; settled from now on."""
        excluded: list[Exclusion] = []
        while self._excluded and (not excluded or len(excluded) + len(self._excluded[0]) <= EXCLUSIONS_PER_ENTRY):
            excluded += self._excluded.popleft()
        for exclusion in excluded:
            self._settle(exclusion.episode_id)
        return excluded

    def _discard(self, group: Group, reason: str) -> None:
        self._excluded.append(group.discard(reason))
        self._remove(group)
        self.notify()

    def _remove(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._start_steps.pop(group.group_id, None)
        self._completion_steps.pop(group.group_id, None)

    def _settle(self, episode_id: str) -> None:
        self._ledger.settle(episode_id)
        self._group_of.pop(episode_id, None)

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = anyio.Event()


def compute_max_replaced(configuration: Configuration) -> int:
    """Number of groups without signal that a batch may replace."""
    algorithm = configuration.algorithm
    return algorithm.dynamic_sampling_batches * configuration.learner.groups if algorithm.dynamic_sampling else 0
