"""Detects stalls: where a run is stuck, and since when. Pure: evaluates the folded state of a run.

Silent hangs are what users of such systems complain of most, so every wait that can hold a whole run has a name here. Progress
is an episode that ended or a step that was trained; a lineage that begins, and a request where nothing was open, start the
clock. Episodes that end without a verdict, one after the other, are progress of which nothing comes: that is said too, as
are groups of which none is trained, and a policy that has nothing to learn from any more (`core.training.learning_signal`).
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from fleetbus.bus.base import STORES_NOTHING
from fleetbus.config.settings import ADMISSION_SHARE, FULL_SHARE
from fleetbus.core.training.learning_signal import MANY_GROUPS
from fleetbus_schemas import GRADED
from fleetbus_workers.observe.run.pools import count_pools
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import GroupRow, RunState
from fleetbus_workers.observe.run.worker_registry import WorkerRow

STALL_SECONDS = 60.0
"""Without progress for this long something is said."""

MANY_WITHOUT_VERDICT = 16
"""So many training episodes since the last step, all without a verdict, are no accident any more."""

MANY_BATCHES = 32
"""Groups for so many batches that ended since the last step, and no step: dynamic sampling replaces up to 10 by default."""

ALIVE = ("working", "draining")

DISK_ADVICE = "make room on its disk, then restart it (the server of `fleetbus up` restarts itself)"
"""As of nats-server 2.15, which takes nothing before that, however much room there is: docs/cluster.md, "A full disk"."""

PAUSED = "admission is paused: no new episodes are requested until `fleetbus pause --resume`"


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a run stands. ``where`` is a role, ``log`` or ``policy``; ``seconds`` how long it has been so."""

    where: str
    reason: str
    seconds: float
    advice: str

    @property
    def line(self) -> str:
        return f"stuck at the {self.where} for {self.seconds:.0f} s: {self.reason}; {self.advice}"


def find_stalls(
    state: RunState,
    health: LogHealth,
    *,
    now: float,
    now_ns: int,
    admission: float = ADMISSION_SHARE,
    stall_seconds: float = STALL_SECONDS,
) -> list[Stall]:
    """The causes of a stall, most specific first; empty while the run progresses, is finished, or has not begun. Whether it
    ended for another reason is checked first (`fleetbus_workers.observe.run.termination`).

    ``now`` is monotonic seconds, ``now_ns`` the server's time; ``admission`` the share of the log that requests may fill.
    """
    if state.training.is_finished:
        return []
    if health.problem:
        seconds = max(now - health.problem_since, 0.0)
        advice = "check that nats-server is running and reachable"
        return [Stall(where="log", reason=health.problem, seconds=seconds, advice=advice)]
    detector = StallDetector(state, health, now, now_ns, admission)
    if nothing_stored := detector.check_storage():
        return nothing_stored
    unproductive = [
        *detector.check_problems(),
        *detector.check_pools(now_ns, stall_seconds),
        *detector.check_verdicts(now_ns, stall_seconds),
        *detector.check_training(now_ns, stall_seconds),
        *detector.check_policy(now_ns, stall_seconds),
    ]
    if not detector.stuck_seconds or detector.stuck_seconds < stall_seconds:
        return unproductive
    full = detector.check_log(FULL_SHARE)
    if full:
        return full
    if not detector.open:
        return [*unproductive, *(detector.check_log(admission) or detector.check_learner())]
    return [*([*detector.check_environments(), *detector.check_inference()] or detector.check_stages()), *unproductive]


def find_notes(state: RunState, *, now_ns: int, patience_seconds: float = STALL_SECONDS) -> list[str]:
    """Informational notes: that admission is paused, or that the policy has nothing left to learn."""
    if state.training.is_finished:
        return []
    found = state.progress.signal.diagnose(now_ns, patience_seconds=patience_seconds)
    solved = [found.line] if found is not None and found.kind == "solved" else []
    return [PAUSED, *solved] if state.worker_registry.is_paused else solved


class StallDetector:
    """One check per method; an empty list means no problem."""

    def __init__(self, state: RunState, health: LogHealth, now: float, now_ns: int, admission: float) -> None:
        open_episodes = state.count_open()
        self._state = state
        self._health = health
        self._now = now
        self._admission = admission
        self._workers = state.worker_registry.rows(now)
        self.waiting, self.running = open_episodes.waiting, open_episodes.running
        self.stuck_seconds = state.compute_stuck_seconds(now_ns, open_episodes.oldest_ns)
        self._environments = self._find_alive("environment")
        self._inference = self._find_alive("inference")
        self._pools = count_pools(state, self._workers)
        self._stages = _stages(state, {row.worker for row in self._environments})

    @property
    def open(self) -> int:
        return self.waiting + self.running

    @property
    def _open_episodes(self) -> str:
        return f"{_pluralize(self.waiting, 'episode')} waiting, {self.running} running"

    # The server's disk

    def check_storage(self) -> list[Stall]:
        """Find a server that stores nothing any more: everything else that stands, stands because of that."""
        if self._health.storage_problem:
            reason = f"nats-server stores nothing since a write failed ({self._health.storage_problem})"
            seconds = max(self._now - self._health.storage_problem_since, 0.0)
            return [Stall(where="log", reason=reason, seconds=seconds, advice=DISK_ADVICE)]
        told = [row for row in self._workers if row.state in ALIVE and row.note == STORES_NOTHING]
        if not told:
            return []
        reason = f"{told[0].worker} says: {STORES_NOTHING}"
        return [Stall(where="log", reason=reason, seconds=self.stuck_seconds, advice=DISK_ADVICE)]

    # What workers say themselves

    def check_problems(self) -> list[Stall]:
        """Find workers that report what keeps them from their work."""
        return [
            Stall(where=row.role, reason=f"{row.worker}: {row.note}", seconds=self.stuck_seconds, advice="see its log")
            for row in self._workers
            if row.state in ALIVE and row.note
        ]

    # The log

    def check_log(self, share: float) -> list[Stall]:
        """Find a log so full that publishers wait for space."""
        used = self._health.bytes / self._health.limit_bytes if self._health.limit_bytes else 0.0
        if used < share:
            return []
        who = "messages of workers are refused" if used >= FULL_SHARE else "new requests wait"
        advice = "run `fleetbus recorder --archive DIR`, or raise nats.max_bytes"
        return [self._stall("log", f"it is {used:.0%} full: {who}", advice)]

    # Environment workers

    def check_pools(self, now_ns: int, stall_seconds: float) -> list[Stall]:
        """Find pools in which episodes wait and that no live worker serves, while another one is served."""
        if not all(row.pools for row in self._environments):  # one of an older version does not tell
            return []
        served = any(row.workers for row in self._pools)
        found = []
        for row in self._pools:
            seconds = (now_ns - row.oldest_ns) / 1e9 if row.oldest_ns else 0.0
            if served and not row.workers and seconds >= stall_seconds:
                reason = f"{_pluralize(row.waiting, 'episode')} waiting in pool {row.pool}, which no environment worker serves"
                advice = f"start `fleetbus environment --environment-pools {row.pool}`"
                found.append(Stall(where="environment", reason=reason, seconds=seconds, advice=advice))
        return found

    def check_environments(self) -> list[Stall]:
        """Find open episodes without a worker to run them."""
        if not self._environments:
            reason = f"{self._open_episodes}, and no environment worker is alive{self._describe_last_worker('environment')}"
            return [self._stall("environment", reason, "start `fleetbus environment`")]
        if not self.waiting:
            return []
        able = [row for row in self._environments if row.state == "working"]
        if not able:
            reason = f"{self._open_episodes}, and every environment worker is draining"
            return [self._stall("environment", reason, "start `fleetbus environment`")]
        waiting = {row.pool for row in self._pools if row.waiting}
        able = [row for row in able if not row.pools or waiting.intersection(row.pools)]
        free = sum(max(row.slots - row.in_flight, 0) for row in able)
        if free:
            takers = f"{_pluralize(len(able), 'environment worker')} with {_pluralize(free, 'free slot')}"
            reason = f"{self._open_episodes}, and {takers} take none"
            advice = "check that they serve its run.pool (environment.pools), and see their logs"
            return [self._stall("environment", reason, advice)]
        return []

    def check_stages(self) -> list[Stall]:
        """Find what running episodes wait for: the policy or the environment, the larger part first."""
        answering = sum(row.in_flight for row in self._inference)
        asking = self._stages.pop("action", 0)
        inside = sum(self._stages.values())
        found = []
        if answering or asking:
            reason = f"{self._open_episodes}; {answering} observations are being answered, and none completes"
            if not answering:
                reason = f"{self._open_episodes}; {asking} wait for an action that no inference worker is computing"
            advice = "see their logs; the engine may hang, or serve another run.policy than the episodes request"
            found.append((max(answering, asking), self._stall("inference", reason, advice)))
        if inside or not found:
            reason = f"{self._open_episodes}, and none completes{self._format_stages()}{self._describe_oldest_group()}"
            found.append((inside, self._stall("environment", reason, "see `fleetbus sessions`")))
        return [stall for _, stall in sorted(found, key=lambda each: -each[0])]

    def _format_stages(self) -> str:
        counted = ", ".join(f"{count} in {stage}" for stage, count in self._stages.most_common())
        return f" ({counted})" if counted else ""

    def _describe_oldest_group(self) -> str:
        """The group that has waited longest for its last episodes."""
        waiting = [group for group in self._state.groups() if group.open and group.graded]
        return f"; {_describe_waiting_group(waiting[0], self._state)}" if waiting else ""

    # Inference workers

    def check_inference(self) -> list[Stall]:
        """Find out if no inference worker with the right version is alive."""
        if not self.running or not self._environments:
            return []
        alive, wanted = self._inference, self._state.progress.version
        if not alive:
            reason = f"{self.running} episodes run and no inference worker is alive{self._describe_last_worker('inference')}"
            return [self._stall("inference", reason, "start `fleetbus inference`")]
        newest = max(row.policy_version for row in alive)
        if newest < wanted:
            have = f"the newest loaded version is {newest}" if newest >= 0 else "none has loaded a version"
            reason = f"no inference worker has loaded version {wanted} ({have})"
            return [self._stall("inference", reason, "see their logs, and check that --run-folder is shared")]
        return []

    # The learner

    def check_learner(self) -> list[Stall]:
        """Find the reason why no episode is requested."""
        alive = self._find_alive("learner")
        if not alive:
            reason = f"no learner is alive{self._describe_last_worker('learner')}"
            return [self._stall("learner", reason, "start `fleetbus learner`; it resumes from its checkpoint")]
        if self._state.worker_registry.is_paused:
            return []
        groups, batch = alive[0].in_flight, alive[0].slots
        if groups >= batch > 0:
            reason = f"no episode is open; it has {groups} groups, so it should train, publish or store a checkpoint"
            return [self._stall("learner", reason, "see its log")]
        reason = (
            f"nothing is admitted: it waits for a batch of {_pluralize(batch, 'group')}, has {groups}, and requests no episode"
        )
        return [
            self._stall(
                "learner", reason, "see its log; recent groups may have too few verdicts, or a version may not be stored"
            )
        ]

    def check_verdicts(self, now_ns: int, stall_seconds: float) -> list[Stall]:
        """Find out if episodes end and nothing can be learned from any of them."""
        since = max(self._state.last_step_ns, self._state.lineage_ns)
        ended = self._state.since_step
        count = ended.total()
        seconds = (now_ns - since) / 1e9 if since else 0.0
        if seconds < stall_seconds or count < MANY_WITHOUT_VERDICT or any(ended[outcome] for outcome in GRADED):
            return []
        outcomes = ", ".join(f"{outcome} {number}" for outcome, number in ended.most_common())
        classes = ", ".join(name for name, _ in self._state.errors.most_common(3))
        reason = (
            f"none of the {count} episodes since the last step has a verdict: {outcomes}{f' ({classes})' if classes else ''}"
        )
        advice = f"inspect one: `fleetbus episodes RUN --outcome {ended.most_common(1)[0][0]}`"
        return [Stall(where="environment", reason=reason, seconds=seconds, advice=advice)]

    def check_training(self, now_ns: int, stall_seconds: float) -> list[Stall]:
        """Find out if groups end one after the other, with verdicts, and no step takes any of them."""
        state, learners = self._state, self._find_alive("learner")
        since, ended = max(state.last_step_ns, state.lineage_ns), len(state.groups_since_step)
        batch = max((row.slots for row in learners), default=0)
        seconds = (now_ns - since) / 1e9 if since else 0.0
        if not batch or seconds < stall_seconds or ended < max(MANY_BATCHES * batch, MANY_GROUPS):
            return []
        if not any(state.since_step[outcome] for outcome in GRADED):
            return []
        groups = [group for group in state.groups() if group.group_id in state.groups_since_step]
        flat = sum(group.graded >= 2 and group.spread == 0 for group in groups)
        small = sum(group.graded < 2 for group in groups)
        why = f"{flat} had equal rewards, {small} fewer than two verdicts"
        reason = f"no step was trained, though {_pluralize(ended, 'group')} ended since the last one: {why}"
        advice = (
            "check learner.min_group_size against the verdicts per group, and algorithm.dynamic_sampling, which replaces groups"
        )
        return [Stall(where="learner", reason=reason, seconds=seconds, advice=advice)]

    # The policy

    def check_policy(self, now_ns: int, stall_seconds: float) -> list[Stall]:
        """Find out if steps are trained and nothing is learned from any."""
        found = self._state.progress.signal.diagnose(now_ns, patience_seconds=stall_seconds)
        if found is None or found.kind == "solved":
            return []
        seconds = (now_ns - found.since_ns) / 1e9
        return [Stall(where="policy", reason=found.reason, seconds=seconds, advice=found.advice)]

    # What all need

    def _find_alive(self, role: str) -> list[WorkerRow]:
        """The workers of the run's own policy, and those that serve all."""
        others = self._state.joined.names
        return [row for row in self._workers if row.role == role and row.state in ALIVE and row.policy not in others]

    def _describe_last_worker(self, role: str) -> str:
        gone: Sequence[WorkerRow] = [row for row in self._workers if row.role == role]
        if not gone:
            return ""
        last = min(gone, key=lambda row: row.seconds)
        note = f": {last.note}" if last.note else ""
        return f" ({last.worker} is {last.state} for {last.seconds:.0f} s{note})"

    def _stall(self, where: str, reason: str, advice: str) -> Stall:
        return Stall(where=where, reason=reason, seconds=self.stuck_seconds, advice=advice)


def _stages(state: RunState, alive: set[str]) -> Counter[str]:
    """Number of episodes in each stage now, as the heartbeats of environment workers count beginnings and ends."""
    found: Counter[str] = Counter()
    for beat in state.worker_registry.list_heartbeats():
        if beat.role == "environment" and beat.worker in alive:
            for name, count in beat.counters.items():
                if name.startswith("begun_"):
                    stage = name.removeprefix("begun_")
                    begun = count - beat.counters.get(f"ended_{stage}", 0.0)
                    found[stage] += int(begun) if 0 < begun < math.inf else 0
    return +found


def _describe_waiting_group(group: GroupRow, state: RunState) -> str:
    missing = [id for id in group.ids if not state.episodes.rows[id].outcome]
    named = ", ".join(f"{id} on {state.episodes.rows[id].worker or 'no worker'}" for id in missing[:3])
    return f"group {group.group_id} waits for {len(missing)} of its {group.episodes}: {named}"


def _pluralize(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
