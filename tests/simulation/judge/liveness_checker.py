"""Checks progress once nothing goes wrong any more: every kind of wait ends within its bound.

A fleet that only stays safe may stand still for ever. Waits that began before count from the end of the last fault.
"""

from __future__ import annotations

import anyio

from tests.simulation.judge.episode_checker import EpisodeRecord
from tests.simulation.judge.log_checker import LogChecker
from tests.simulation.judge.oracle import FaultOracle
from tests.simulation.observer import Observer

ANSWER_SECONDS = 60.0
"""An observation has its Action: a lease and a takeover, or an engine's queue."""

ENVIRONMENT_SECONDS = 120.0
"""After a claim or an Action comes an observation or a result, or another worker's claim: all stages within their limits."""

CLAIM_SECONDS = 180.0
"""A request is claimed while most slots are free."""

PROGRESS_SECONDS = 360.0
"""Something is stored beside heartbeats: longer than a learner waits for a checkpoint or for room, and an operator after it."""


class LivenessChecker:
    """`check` is called now and then."""

    def __init__(self, observer: Observer, log_checker: LogChecker, oracle: FaultOracle) -> None:
        self._observer = observer
        self._log_checker = log_checker
        self._oracle = oracle

    def check(self) -> None:
        """Report every wait that is over its bound; nothing before the world has healed."""
        if not self._observer.has_healed or self._log_checker.has_finished:
            return
        now = anyio.current_time()
        for episode, record in tuple(self._log_checker.episodes.open.items()):
            self._check_episode(episode, record, now)
        self._require(now, self._log_checker.stored_at, PROGRESS_SECONDS, "the run goes on", "nothing was stored")

    def _check_episode(self, episode: str, record: EpisodeRecord, now: float) -> None:
        if not record.claims:
            if self._has_free_slots():
                self._require(now, record.requested_at, CLAIM_SECONDS, "a request is claimed", episode)
            return
        if self._oracle.waits_for_last_attempt(record):
            return
        attempt = len(record.claims)
        observed = max((turn for number, turn in record.observations if number == attempt), default=-1)
        if observed >= 0 and (attempt, observed) not in record.turns:
            at = record.observed_at[attempt, observed]
            self._require(now, at, ANSWER_SECONDS, "an observation is answered", f"{episode} attempt {attempt} turn {observed}")
        else:
            name = f"{episode} attempt {attempt} on {record.claims[-1][1].worker}"
            self._require(now, record.last_at, ENVIRONMENT_SECONDS, "an attempt goes on", name)

    def _require(self, now: float, since: float, bound: float, invariant: str, detail: str) -> None:
        waited = now - max(since, self._observer.last_disturbed)
        self._observer.require(waited <= bound, invariant, f"{detail}: for {waited:.0f} s")

    def _has_free_slots(self) -> bool:
        """More than half of the slots of the environment workers that take work."""
        working = [each for each in self._oracle.processes.values() if each.role == "environment" and each.is_alive]
        slots = sum(process.slots for process in working if not process.drain.is_set())
        held = sum(bool(record.claims) for record in self._log_checker.episodes.open.values())
        return held < slots / 2
