"""Test oracle for what the log alone cannot show: that an outcome has a cause, a takeover a reason, an ack its result.

A calm fleet completes every episode at the first attempt; whatever else is recorded must have been caused, and the cause is
known here: disturbances by the simulation, and what each environment really did. Deadlines and slots are checked here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import EPOCH_NS
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, TASK_LEASE_SECONDS
from fleetbus_schemas import GRADED, AttemptStarted, EpisodeFinished, Heartbeat, Observation, decode
from tests.simulation.doubles.environments import EnvironmentRecord
from tests.simulation.judge.episode_checker import EpisodeRecord
from tests.simulation.observer import ALL_WORKERS, GARBAGE, Observer
from tests.simulation.platform.bus import STREAM
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import STEP_SECONDS, Scenario

LEASE_MARGIN_SECONDS = TASK_LEASE_SECONDS + 4.0
"""How long after a fault a lease that suffered from it may still run out."""

POISON_TRIES = 3

STOPPING = frozenset({"pause", "cut", "slow_consumer", "restart_server", "elect"})
"""Disturbances that cost deliveries for as long as they last."""

DEADLINE_SECONDS = 600.0
"""Episodes with as much time, or more, never run out of it but by a fault."""

DEADLINE_MARGIN_SECONDS = 0.01
"""What time limits may end earlier for rounding: they are counted in seconds from when an attempt began."""

STOP_SECONDS = 60.0
"""A superseded attempt notices by then, unless its worker was disturbed again: when an Action is late (seconds), or when the
stages that are left are over. Less than the limit of waiting for an Action, which would end it in any case."""

UNANSWERED_SECONDS = 25.0
"""So soon notices one that waits for an Action: it reads the log every ten seconds."""

REPLACED_SECONDS = 20.0
"""A replaced learner is gone by then; what it computes outside the event loop takes less."""

RETRY_SECONDS = 10.0
"""Rejected weights are tried again by then (twice what the worker promises)."""

STORING_SECONDS = 10.0
"""A request is stored by so long after its deadline was set."""

OUTCOME_MARGIN_SECONDS = 60.0
"""After deadline and grace: the requester's next look, and its own restart when it is down at that instant."""


class FaultOracle:
    """``environment_record`` is what happened with environments, by (episode, attempt); ``processes`` are all there ever were,
    by name."""

    def __init__(self, observer: Observer, scenario: Scenario, *, grace_seconds: float) -> None:
        self._observer = observer
        self._grace_seconds = grace_seconds
        self._idle_seconds = scenario.idle_seconds
        self._max_attempts = scenario.max_attempts
        self._is_slow, self._episode_seconds = scenario.pace.work > 1, scenario.episode_seconds
        self._longer_step_seconds = scenario.pace.step_seconds - STEP_SECONDS
        self._has_short_deadlines = scenario.episode_seconds < DEADLINE_SECONDS * scenario.pace.work
        self.environment_record: dict[tuple[str, int], EnvironmentRecord] = {}
        self.processes: dict[str, Process] = {}
        self.record: Mapping[str, EpisodeRecord] = {}
        self.cancelled: set[str] = set()
        self.heard: set[str] = set()
        """Workers that have said that they live."""
        self.newest_version = -1
        self.clock_slack_seconds = 0.0
        """By how much the server's clock was set, forward or back, all steps together."""
        self.now_ns: Callable[[], int] = lambda: EPOCH_NS + int(anyio.current_time() * 1e9)
        self._superseded: dict[tuple[str, int], float] = {}

    # Claims and results

    def register_environment(self, environment_record: EnvironmentRecord) -> None:
        """An environment is opened for an attempt, after its claim."""
        key = (environment_record.episode, environment_record.attempt)
        self._observer.require(
            key not in self.environment_record, "one environment per attempt", f"{key} on {environment_record.process.name}"
        )
        self.environment_record[key] = environment_record
        refused = self.record[environment_record.episode].refused
        self._observer.require(
            not refused, "what the floor refuses is not played", f"{key} on {environment_record.process.name}"
        )
        record = self.record.get(environment_record.episode)
        if record is not None and (record.result is not None or len(record.claims) > environment_record.attempt):
            self._superseded[key] = anyio.current_time()

    def check_claim(self, record: EpisodeRecord, claim: AttemptStarted) -> None:
        """A new attempt takes an episode away only if something happened to the one before, or to its own delivery.

        A process that was stopped or cut off may take up a delivery that was given to somebody else meanwhile.
        """
        if not record.claims:
            return
        self._mark_superseded(record)
        if record.released:
            return
        before_at, before = record.claims[-1]
        since = before_at - LEASE_MARGIN_SECONDS
        episode = before.episode_id
        excused = (
            not self.processes[before.worker].is_alive  # whether it had a right to end was judged when it ended
            or self._observer.was_disturbed(before.worker, since=since)
            or self._observer.was_disturbed(claim.worker, since=since)
            or self._observer.message_faults(episode, since=since, kind="read_lost")  # its handler gives up, without a death
            or self._observer.message_faults(episode, since=since, kind="delivery_repeated", subject="task")
            or self._observer.message_faults(episode, since=since, kind="ack_lost", subject="task") >= POISON_TRIES
        )
        self._observer.require(bool(excused), "no worker takes over from a healthy one", f"{episode} from {before.worker}")

    def check_result(self, record: EpisodeRecord, result: EpisodeFinished, at: float) -> None:
        environment_record = self.environment_record.get((result.episode_id, result.attempt))
        name = f"{result.episode_id} attempt {result.attempt}: {result.outcome} {result.error_class} {result.error}"
        self._check_deadline(record, at)
        self._mark_superseded(record)
        is_played = bool(record.claims) and result.worker == record.claims[-1][1].worker and result.error_class != "poison"
        if is_played and environment_record is not None and result.outcome != "cancelled":
            self._observer.require(environment_record.closes == 1, "close runs before the result is stored", name)
        if result.outcome in GRADED:
            right = environment_record is not None and environment_record.reward == result.reward
            self._observer.require(right, "the reward is the verifier's", name)
            if environment_record is not None:
                self._check_seats(environment_record, result, name)
        elif not self._has_cause(record, result, environment_record):
            self._observer.violate("every failure has a cause", name)

    def _check_seats(self, environment_record: EnvironmentRecord, result: EpisodeFinished, name: str) -> None:
        """Turns are those of who acted, rewards those of the verifier. Summaries are turns that no environment sees."""
        rewards = {seat.name: seat.reward for seat in result.seats}
        self._observer.require(rewards == environment_record.seats, "a seat's reward is the verifier's", f"{name}: {rewards}")
        acted = {turn: seat.name for seat in result.seats for turn in seat.turns}
        if result.seats and len(environment_record.acted) == result.turns:
            right = [acted.get(turn) for turn in range(result.turns)] == environment_record.acted
            self._observer.require(right, "a turn belongs to the seat that acted", f"{name}: {result.seats}")

    def _mark_superseded(self, record: EpisodeRecord) -> None:
        """The newest attempt is superseded: its worker must stop it."""
        key = (record.request.episode_id, len(record.claims))
        if key in self.environment_record and not self.environment_record[key].closes:
            self._superseded[key] = anyio.current_time()

    def check_superseded(self) -> None:
        """A worker that has lost an episode closes its environment (docs/concepts/delivery.md, rule 6)."""
        now = anyio.current_time()
        for key, since in tuple(self._superseded.items()):
            environment_record = self.environment_record[key]
            if environment_record.closes or not environment_record.process.is_alive:
                del self._superseded[key]
            elif self._is_overdue(environment_record, max(since, environment_record.called_until), now):
                name = f"{key[0]} attempt {key[1]} on {environment_record.process.name}"
                self._observer.violate("a superseded attempt stops", f"{name}: since {since:.1f} s")
                del self._superseded[key]

    def _is_overdue(self, environment_record: EnvironmentRecord, since: float, now: float) -> bool:
        """Who waits for an answer about its episode, or whether its observation is acked, cannot notice until that is over."""
        bound = STOP_SECONDS + self._longer_step_seconds if environment_record.called else UNANSWERED_SECONDS
        worker, stream = environment_record.process.name, STREAM.rpartition(".")[2]
        reads_until = self._observer.reads_until(worker, environment_record.episode, stream)
        return now - max(since, self._observer.disturbed_until(worker), reads_until) > bound

    def check_replaced(self, replaced: Mapping[str, float]) -> None:
        """A replaced learner learns of it from the log, also with nothing to write (docs/concepts/delivery.md, rule 8)."""
        now = anyio.current_time()
        for name, at in replaced.items():
            process = self.processes[name]
            since = max(at, self._observer.disturbed_until(name), self._observer.reads_until(name))
            if process.is_alive and now - since > REPLACED_SECONDS:
                self._observer.violate("a replaced learner ends", f"{name}: since {at:.1f} s")

    def waits_for_last_attempt(self, record: EpisodeRecord) -> bool:
        """Its worker is gone, and one more loss would make it poison: of such episodes a worker plays few at a time."""
        is_gone = not self.processes[record.claims[-1][1].worker].is_alive
        return is_gone and len(record.claims) - record.releases >= self._max_attempts - 1

    def check_versions(self) -> None:
        """An engine that rejected the newest weights is given them again: they may have been on their way."""
        now = anyio.current_time()
        for process in self.processes.values():
            waits = process.rejected_at is not None and process.is_alive and not process.drain.is_set()
            if waits and process.rejected_at is not None and now - process.rejected_at > RETRY_SECONDS:
                self._observer.violate(
                    "a rejected version is tried again", f"{process.name}: since {process.rejected_at:.1f} s"
                )
                process.rejected_at = None

    def _has_cause(self, record: EpisodeRecord, result: EpisodeFinished, environment_record: EnvironmentRecord | None) -> bool:
        fault_profile = environment_record.fault_profile if environment_record is not None else set()
        if self._cannot_be_served(record) or record.refused:
            return True
        since = find_first_claim_seconds(record)
        match result.outcome, result.error_class:
            case "cancelled", _:
                return result.episode_id in self.cancelled
            case "env_failed", _:
                unmade = self._observer.message_faults(result.episode_id, kind="unmade")
                return bool(fault_profile & {"open", "reset", "step"}) or unmade > 0
            case "verifier_unknown", _:
                return bool(fault_profile & {"verify", "step"})
            case "lost", "poison":
                return len(record.claims) - record.releases >= self._max_attempts
            case ("lost", "poison_observation") | ("timeout", "action_timeout"):
                if result.outcome == "timeout" and not self._has_restarted(since):  # a server that restarts counts from 1
                    return False
                faults = [
                    self._observer.message_faults(result.episode_id, since=since, subject=kind) for kind in ("obs", "act")
                ]
                return sum(faults) + self._count_swallowed_observations(record, since) >= POISON_TRIES
            case "lost", "diverged":
                return any(each.diverges for key, each in self.environment_record.items() if key[0] == result.episode_id)
            case "timeout", "open_timeout" | "reset_timeout" | "step_timeout":
                return result.error_class.removesuffix("_timeout") in fault_profile
            case "timeout", "episode_timeout" | "unanswered" if self._was_clock_set(record) and self._is_expired(record):
                return True  # of who waits for a worker; who is being played has the time that he had
            case "timeout", _ if self._has_short_deadlines and self._is_expired(record) and self._had_time(record):
                return True
            case "timeout", "idle_timeout":
                return environment_record is not None and environment_record.idle_seconds > self._idle_seconds - 0.001
        return False

    def _count_swallowed_observations(self, record: EpisodeRecord, since: float) -> int:
        """How many deliveries of one observation disturbances may have cost: one each that touched the server, an inference
        worker or the episode's own, and one more per lease for which the server or an inference worker stood."""
        own = {claim.worker for _, claim in record.claims}
        count = 0
        for each in self._observer.disturbances:
            process = self.processes.get(each.worker)
            receives = each.worker == ALL_WORKERS or (process is not None and process.role == "inference")
            if each.stop < since or not (receives or each.worker in own):
                continue
            lasts = each.stop - max(each.start, since) if receives and each.kind in STOPPING else 0.0
            count += 1 + int(lasts / OBSERVATION_LEASE_SECONDS)
        return count

    def _has_restarted(self, since: float) -> bool:
        return any(each.kind == "restart_server" and each.stop >= since for each in self._observer.disturbances)

    def _was_clock_set(self, record: EpisodeRecord) -> bool:
        """Set by more than what episodes have, since its request was made."""
        since = record.requested_at - STORING_SECONDS
        return any(each.kind == "set_clock" and each.start >= since for each in self._observer.disturbances)

    def _is_expired(self, record: EpisodeRecord) -> bool:
        """The deadline has passed, or had before a clock was set back."""
        return self.now_ns() + int((self.clock_slack_seconds + DEADLINE_MARGIN_SECONDS) * 1e9) >= record.request.deadline_ns

    def _had_time(self, record: EpisodeRecord) -> bool:
        """In worlds of days a deadline is no cause if it gave less than half of the time that episodes have."""
        seconds = (record.request.deadline_ns - EPOCH_NS) / 1e9 - record.requested_at
        return not self._is_slow or seconds + self.clock_slack_seconds > self._episode_seconds / 2

    def _cannot_be_served(self, record: EpisodeRecord) -> bool:
        """An evaluation is pinned to a version; once a newer one exists, or a worker rejected one, no engine may have it."""
        pinned = record.request.pinned_version
        rejected = any(each.kind == "weights_rejected" for each in self._observer.disturbances)
        return pinned is not None and (self.newest_version > pinned or rejected)

    def _check_deadline(self, record: EpisodeRecord, at: float) -> None:
        late = self.compute_seconds_late(record, at)
        self._observer.require(late <= 0, "an outcome by deadline and grace", f"{record.request.episode_id}: {late:.1f} s late")

    def compute_seconds_late(self, record: EpisodeRecord, at: float) -> float:
        """Seconds beyond the instant by which the episode must have an outcome."""
        deadline = (record.request.deadline_ns - EPOCH_NS) / 1e9
        return at - deadline - self._grace_seconds - OUTCOME_MARGIN_SECONDS - self.clock_slack_seconds

    # What only a wire sees

    def on_ack(self, worker: str, message: StreamEntry) -> None:
        """An ack follows what it stands for (docs/concepts/delivery.md, rule 5)."""
        if message.payload == GARBAGE:
            return
        kind, episode = message.subject.split(".")[2], message.subject.rpartition(".")[2]
        record = self.record.get(episode)
        if record is None:
            self._observer.violate("an ack follows its request", f"{kind} of {episode} by {worker}")
        elif kind == "task":
            self._observer.require(record.result is not None, "a request is acked after its result", f"{episode} by {worker}")
        elif kind == "obs":
            self._enter_ack(worker, message, record)

    def _enter_ack(self, worker: str, message: StreamEntry, record: EpisodeRecord) -> None:
        """An observation that can no more be answered may be acked, too: the server would refuse its action; and one that was
        sent ahead of others, which is sent again in its turn."""
        observation = decode(Observation, message.payload, subject=message.subject)
        answered = (observation.attempt, observation.turn) in record.turns
        is_stale = record.result is not None or len(record.claims) > observation.attempt
        is_outdated = record.last_actions.get(observation.environment_lane, 0) != observation.action_sequence
        is_outdated = is_outdated or observation.ahead > 0
        right = answered or is_stale or is_outdated or self._is_expired(record)
        self._observer.require(right, "an observation is acked after its action", f"{record.request.episode_id} {worker}")

    def on_broadcast(self, worker: str, subject: str, payload: bytes) -> None:
        heartbeat = decode(Heartbeat, payload, subject=subject)
        self.heard.add(worker)
        process = self.processes[worker]
        if process.role != "learner":
            said = f"{worker}: {heartbeat.in_flight} of {heartbeat.slots}"
            self._observer.require(heartbeat.in_flight <= process.slots, "in_flight <= slots", said)

    # The end

    def check_environments(self) -> None:
        """Whatever was opened was closed, once, unless its process was killed."""
        for (episode, attempt), environment_record in self.environment_record.items():
            if environment_record.process.ending == "crashed":
                continue
            name = f"{episode} attempt {attempt} on {environment_record.process.name}: closed {environment_record.closes} times"
            self._observer.require(environment_record.closes == 1, "close is called exactly once", name)
            closed = environment_record.closed or "close" in environment_record.fault_profile
            self._observer.require(closed, "close runs to its end", name)


def find_first_claim_seconds(record: EpisodeRecord) -> float:
    return record.claims[0][0] if record.claims else record.requested_at
