"""Judges what the log alone cannot show: whether an outcome has a cause, a takeover a reason, an ack its result.

A calm fleet completes every episode at the first attempt; whatever else is recorded must have been caused, and the cause is
known here: disturbances by the simulation, and what each environment really did. Deadlines and slots are checked here, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from fleetbus.bus.base import Stored
from fleetbus.bus.memory import EPOCH_NS
from fleetbus.bus.streams import TASK_LEASE_SECONDS
from fleetbus_schemas import GRADED, AttemptStarted, EpisodeFinished, Heartbeat, Observation, decode
from fleetbus_workers.simulation.environments import Played
from fleetbus_workers.simulation.episode_books import EpisodePages
from fleetbus_workers.simulation.process import Process
from fleetbus_workers.simulation.watch import Watch

LEASE_MARGIN_SECONDS = TASK_LEASE_SECONDS + 4.0
"""How long after a fault a lease that suffered from it may still run out."""

POISON_TRIES = 3

STOP_SECONDS = 60.0
"""A superseded attempt notices by then, unless its worker was disturbed again: when an Action is late (seconds), or when the
stages that are left are over. Less than the limit of waiting for an Action, which would end it in any case."""

REPLACED_SECONDS = 20.0
"""A replaced learner is gone by then; what it computes outside the event loop takes less."""

RETRY_SECONDS = 10.0
"""Rejected weights are tried again by then (twice what the worker promises)."""

OUTCOME_MARGIN_SECONDS = 60.0
"""After deadline and grace: the requester's next look, and its own restart when it is down at that instant."""


class Judge:
    """``played`` is what happened with environments, by (episode, attempt); ``processes`` are all there ever were, by name."""

    def __init__(self, watch: Watch, *, grace_seconds: float, idle_seconds: float) -> None:
        self._watch = watch
        self._grace_seconds = grace_seconds
        self._idle_seconds = idle_seconds
        self.played: dict[tuple[str, int], Played] = {}
        self.processes: dict[str, Process] = {}
        self.pages: Mapping[str, EpisodePages] = {}
        self.cancelled: set[str] = set()
        self.newest_version = -1
        self._superseded: dict[tuple[str, int], float] = {}

    # Claims and results

    def opened(self, played: Played) -> None:
        """An environment is opened for an attempt, after its claim."""
        key = (played.episode, played.attempt)
        self._watch.require(key not in self.played, "one environment per attempt", f"{key} on {played.process.name}")
        self.played[key] = played
        pages = self.pages.get(played.episode)
        if pages is not None and (pages.result is not None or len(pages.claims) > played.attempt):
            self._superseded[key] = anyio.current_time()

    def claimed(self, pages: EpisodePages, claim: AttemptStarted) -> None:
        """A new attempt takes an episode away only if something happened to the one before, or to its own delivery.

        A process that was stopped or cut off may take up a delivery that was given to somebody else meanwhile.
        """
        if not pages.claims:
            return
        self._supersede(pages)
        if pages.released:
            return
        before_at, before = pages.claims[-1]
        since = before_at - LEASE_MARGIN_SECONDS
        episode = before.episode_id
        excused = (
            self._watch.was_disturbed(before.worker, since=since)
            or self._watch.was_disturbed(claim.worker, since=since)
            or self._watch.message_faults(episode, since=since, kind="delivery_repeated", subject="task")
            or self._watch.message_faults(episode, since=since, kind="word_lost", subject="task") >= POISON_TRIES
        )
        self._watch.require(bool(excused), "nobody takes over from a healthy worker", f"{episode} from {before.worker}")

    def finished(self, pages: EpisodePages, result: EpisodeFinished, at: float) -> None:
        played = self.played.get((result.episode_id, result.attempt))
        name = f"{result.episode_id} attempt {result.attempt}: {result.outcome} {result.error_class} {result.error}"
        self._check_deadline(pages, at)
        self._supersede(pages)
        is_played = bool(pages.claims) and result.worker == pages.claims[-1][1].worker and result.error_class != "poison"
        if is_played and played is not None and result.outcome != "cancelled":
            self._watch.require(played.closes == 1, "close runs before the result is stored", name)
        if result.outcome in GRADED:
            right = played is not None and played.reward == result.reward
            self._watch.require(right, "the reward is the verifier's", name)
        elif not self._has_cause(pages, result, played):
            self._watch.violate("every failure has a cause", name)

    def _supersede(self, pages: EpisodePages) -> None:
        """Whoever still plays the newest attempt has no more business with it."""
        key = (pages.request.episode_id, len(pages.claims))
        if key in self.played and not self.played[key].closes:
            self._superseded[key] = anyio.current_time()

    def check_superseded(self) -> None:
        """A worker that has lost an episode closes its environment (rule 6: who waits reads the log)."""
        now = anyio.current_time()
        for key, since in tuple(self._superseded.items()):
            played = self.played[key]
            if played.closes or not played.process.is_alive:
                del self._superseded[key]
            elif now - max(since, self._watch.disturbed_until(played.process.name)) > STOP_SECONDS:
                name = f"{key[0]} attempt {key[1]} on {played.process.name}"
                self._watch.violate("a superseded attempt stops", f"{name}: since {since:.1f} s")
                del self._superseded[key]

    def check_replaced(self, replaced: Mapping[str, float]) -> None:
        """A learner that has been replaced learns of it from the log, also when it has nothing to write (rule 8)."""
        now = anyio.current_time()
        for name, at in replaced.items():
            process = self.processes[name]
            if process.is_alive and now - max(at, self._watch.disturbed_until(name)) > REPLACED_SECONDS:
                self._watch.violate("a replaced learner ends", f"{name}: since {at:.1f} s")

    def check_versions(self) -> None:
        """An engine that rejected the newest weights is given them again: they may have been on their way."""
        now = anyio.current_time()
        for process in self.processes.values():
            waits = process.rejected_at is not None and process.is_alive and not process.drain.is_set()
            if waits and process.rejected_at is not None and now - process.rejected_at > RETRY_SECONDS:
                self._watch.violate("a rejected version is tried again", f"{process.name}: since {process.rejected_at:.1f} s")
                process.rejected_at = None

    def _has_cause(self, pages: EpisodePages, result: EpisodeFinished, played: Played | None) -> bool:
        mischief = played.mischief if played is not None else set()
        if self._cannot_be_served(pages):
            return True
        since = at_first_claim(pages)
        match result.outcome, result.error_class:
            case "cancelled", _:
                return result.episode_id in self.cancelled
            case "env_failed", _:
                return bool(mischief & {"open", "reset", "step"})
            case "verifier_unknown", _:
                return bool(mischief & {"verify", "step"})
            case "lost", "poison":
                return len(pages.claims) - pages.releases >= POISON_TRIES
            case "lost", "poison_observation":
                faults = self._watch.message_faults(result.episode_id, since=since)
                return faults + self._watch.disturbances_since(since) >= POISON_TRIES
            case "lost", "diverged":
                return any(each.diverges for key, each in self.played.items() if key[0] == result.episode_id)
            case "timeout", "open_timeout" | "reset_timeout" | "step_timeout":
                return result.error_class.removesuffix("_timeout") in mischief
            case "timeout", "idle_timeout":
                return played is not None and played.idle_seconds > self._idle_seconds - 0.001
        return False

    def _cannot_be_served(self, pages: EpisodePages) -> bool:
        """An evaluation is pinned to a version; once there is a newer one, or somebody rejected one, nobody may have it."""
        pinned = pages.request.pinned_version
        rejected = any(each.kind == "weights_rejected" for each in self._watch.disturbances)
        return pinned is not None and (self.newest_version > pinned or rejected)

    def _check_deadline(self, pages: EpisodePages, at: float) -> None:
        late = self.seconds_late(pages, at)
        self._watch.require(late <= 0, "an outcome by deadline and grace", f"{pages.request.episode_id}: {late:.1f} s late")

    def seconds_late(self, pages: EpisodePages, at: float) -> float:
        """Seconds beyond the instant by which the episode must have an outcome."""
        deadline = (pages.request.deadline_ns - EPOCH_NS) / 1e9
        return at - deadline - self._grace_seconds - OUTCOME_MARGIN_SECONDS

    # What only a wire sees

    def acked(self, worker: str, message: Stored) -> None:
        """An ack follows what it stands for (delivery rule 5)."""
        kind, episode = message.subject.split(".")[2], message.subject.rpartition(".")[2]
        pages = self.pages.get(episode)
        if pages is None:
            self._watch.violate("an ack follows its request", f"{kind} of {episode} by {worker}")
        elif kind == "task":
            self._watch.require(pages.result is not None, "a request is acked after its result", f"{episode} by {worker}")
        elif kind == "obs":
            self._acked_observation(worker, message, pages)

    def _acked_observation(self, worker: str, message: Stored, pages: EpisodePages) -> None:
        """An observation that can no more be answered may be acked, too: the server would refuse its action."""
        observation = decode(Observation, message.payload, subject=message.subject)
        answered = (observation.attempt, observation.turn) in pages.turns
        is_stale = pages.result is not None or len(pages.claims) > observation.attempt
        is_outdated = pages.last_actions.get(observation.environment_lane, 0) != observation.action_sequence
        is_expired = EPOCH_NS + anyio.current_time() * 1e9 >= pages.request.deadline_ns
        right = answered or is_stale or is_outdated or is_expired
        self._watch.require(right, "an observation is acked after its action", f"{pages.request.episode_id} {worker}")

    def broadcasted(self, worker: str, subject: str, payload: bytes) -> None:
        heartbeat = decode(Heartbeat, payload, subject=subject)
        process = self.processes[worker]
        if process.role != "learner":
            said = f"{worker}: {heartbeat.in_flight} of {heartbeat.slots}"
            self._watch.require(heartbeat.in_flight <= process.slots, "in_flight <= slots", said)

    # The end

    def check_environments(self) -> None:
        """Whatever was opened was closed, once, unless its process was killed."""
        for (episode, attempt), played in self.played.items():
            if played.process.ending == "crashed":
                continue
            name = f"{episode} attempt {attempt} on {played.process.name}: closed {played.closes} times"
            self._watch.require(played.closes == 1, "close is called exactly once", name)
            closed = played.closed or "close" in played.mischief
            self._watch.require(closed, "close runs to its end", name)


def at_first_claim(pages: EpisodePages) -> float:
    return pages.claims[0][0] if pages.claims else pages.requested_at
