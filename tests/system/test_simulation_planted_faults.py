"""A check that cannot fail is worth nothing: each fault planted here is one that a worker could have; the simulation finds it.

Faults are planted by patching the workers' own code for the length of a test; production code has no switches for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
import pytest

import fleetbus.episodes
import fleetbus.slots
import fleetbus_workers.environment.episode.attempts as attempts
import fleetbus_workers.environment.episode.policy_client as exchange
import fleetbus_workers.environment.episode.runner as session
import fleetbus_workers.inference.history_cache as histories
import fleetbus_workers.inference.observation_handler as answers
import fleetbus_workers.inference.worker as inference
import fleetbus_workers.learner.journal as book
import fleetbus_workers.learner.pool as pool
import fleetbus_workers.learner.publication as publication
import fleetbus_workers.learner.resume as beginning
import fleetbus_workers.learner.worker as learner
from fleetbus import actions
from fleetbus.core.claims import EpisodeState
from fleetbus.leases import Leases
from fleetbus_schemas import Action, AttemptStarted, EpisodeFinished, encode
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages
from fleetbus_workers.simulation.run import run_seed

pytestmark = pytest.mark.slow

SEEDS = range(1, 201)

Plant = Callable[[pytest.MonkeyPatch], None]


def ack_before_result(patch: pytest.MonkeyPatch) -> None:
    finish = attempts.Attempts._finish

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        await self._ack(result.episode_id)
        await finish(self, result, expected_last)

    patch.setattr(attempts.Attempts, "_finish", faulty)


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    """A superseded attempt goes on, and stores its result after whatever stands there."""
    store = fleetbus.episodes.store_result

    async def faulty(bus: Any, subjects: Any, result: EpisodeFinished, *, expected_last: int) -> Any:
        episode_state = await fleetbus.episodes.read_episode_state(bus, subjects, result.episode_id)
        if episode_state.result is not None:
            return "finished"
        return await store(bus, subjects, result, expected_last=episode_state.last_sequence)

    patch.setattr(attempts, "store_result", faulty)
    patch.setattr(EpisodeState, "is_held_by", lambda self, nonce: self.result is None)


def deliveries_as_attempts(patch: pytest.MonkeyPatch) -> None:
    """``num_delivered`` is taken for the attempt; a killed server counts from 1 again."""
    delivered: dict[str, int] = {}
    run = attempts.Attempts._run

    async def faulty(self: attempts.Attempts, request: Any, delivery: Any, episode_state: EpisodeState) -> None:
        delivered[request.episode_id] = delivery.delivered
        await run(self, request, delivery, episode_state)

    def claim(**fields: Any) -> AttemptStarted:
        return AttemptStarted(**fields | {"attempt": delivered[fields["episode_id"]]})

    patch.setattr(attempts.Attempts, "_run", faulty)
    patch.setattr(attempts, "AttemptStarted", claim)


def no_compare_and_set_of_results(patch: pytest.MonkeyPatch) -> None:
    async def faulty(bus: Any, subjects: Any, result: EpisodeFinished, *, expected_last: int) -> str:
        await bus.publish(subjects.episode(result.episode_id), encode(result))
        return "stored"

    patch.setattr(attempts, "store_result", faulty)


def no_compare_and_set_of_claims(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: attempts.Attempts, running: Any, claim: AttemptStarted, episode_state: EpisodeState) -> int:
        return (await self._bus.publish(self._subjects.episode(claim.episode_id), encode(claim))).sequence

    patch.setattr(attempts.Attempts, "_claim", faulty)


def claim_without_looking(patch: pytest.MonkeyPatch) -> None:
    """A request is taken for new whenever it comes, as if it had never been delivered before."""
    read = attempts.read_episode_state

    async def faulty(bus: Any, subjects: Any, episode: str) -> EpisodeState:
        return EpisodeState() if sys._getframe(1).f_code.co_name == "handle_request" else await read(bus, subjects, episode)

    patch.setattr(attempts, "read_episode_state", faulty)


def lease_not_extended(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: Leases) -> None:
        await anyio.sleep_forever()

    patch.setattr(Leases, "run", faulty)


def close_not_shielded(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: session.EpisodeRunner) -> None:
        try:
            with self._stages.time_limit("close", self._limits.close):
                await self._environment.close()
        except EpisodeEnded:
            return

    patch.setattr(session.EpisodeRunner, "_close", faulty)


def result_before_close(patch: pytest.MonkeyPatch) -> None:
    left_open: dict[str, session.EpisodeRunner] = {}
    close, finish = session.EpisodeRunner._close, attempts.Attempts._finish

    async def leave_open(self: session.EpisodeRunner) -> None:
        left_open[self._request.episode_id] = self

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        await finish(self, result, expected_last)
        if result.episode_id in left_open:
            await close(left_open.pop(result.episode_id))

    patch.setattr(session.EpisodeRunner, "_close", leave_open)
    patch.setattr(attempts.Attempts, "_finish", faulty)


def failure_as_reward_zero(patch: pytest.MonkeyPatch) -> None:
    finish = attempts.Attempts._finish

    async def faulty(self: attempts.Attempts, result: EpisodeFinished, expected_last: int) -> None:
        if result.outcome == "env_failed":
            result = msgspec.structs.replace(result, outcome="completed", reward=0.0)
        await finish(self, result, expected_last)

    patch.setattr(attempts.Attempts, "_finish", faulty)


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    fill = fleetbus.slots.Slots._run_delivery

    async def faulty(self: fleetbus.slots.Slots, delivery: Any, subscription: Any) -> None:
        if self.in_flight == 1:
            subscription.grant(1)
        await fill(self, delivery, subscription)

    patch.setattr(fleetbus.slots.Slots, "_run_delivery", faulty)


def stale_history_accepted(patch: pytest.MonkeyPatch) -> None:
    take_or_rebuild = histories.HistoryCache.take_or_rebuild

    async def faulty(self: histories.HistoryCache, observation: Any) -> histories.History:
        kept = self._entries.get(observation.episode_id)
        if kept is not None and observation.turn:
            return self._entries.pop(observation.episode_id)
        return await take_or_rebuild(self, observation)

    patch.setattr(histories.HistoryCache, "take_or_rebuild", faulty)


def no_compare_and_set_of_actions(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: answers.ObservationHandler, observation: Any, action: Action) -> None:
        await self._bus.publish(self._subjects.action(observation.environment_lane, observation.episode_id), encode(action))

    patch.setattr(answers.ObservationHandler, "_store", faulty)


def observation_acked_before_its_action(patch: pytest.MonkeyPatch) -> None:
    made = answers.ObservationHandler._build_action

    async def faulty(self: answers.ObservationHandler, observation: Any, delivery: Any) -> Action:
        await self._ack(f"{observation.episode_id}.{observation.attempt}.{observation.turn}")
        return await made(self, observation, delivery)

    patch.setattr(answers.ObservationHandler, "_build_action", faulty)


def late_action_not_looked_up(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: exchange.PolicyClient, observation: Any) -> None:
        await anyio.lowlevel.checkpoint()

    patch.setattr(exchange.PolicyClient, "_check_log", faulty)


def rejected_version_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inference, "RELOAD_SECONDS", math.inf)


def settled_as_of_the_checkpoint_instead_of_the_step(patch: pytest.MonkeyPatch) -> None:
    """What was discarded since the step is settled in the checkpoint, although no step has recorded it."""
    store = learner.Learner._store_checkpoint

    async def faulty(self: learner.Learner, checkpoint: Any) -> None:
        settled = {"floor": self._ledger.floor, "settled": self._ledger.settled_above}
        await store(self, msgspec.structs.replace(checkpoint, **settled))

    patch.setattr(learner.Learner, "_store_checkpoint", faulty)


def newest_checkpoint_of_any_lineage(patch: pytest.MonkeyPatch) -> None:
    """Resume follows the newest file instead of the log."""
    newest = beginning._find_newest_checkpoint

    def faulty(entries: Any, surviving: dict[str, float]) -> Any:
        return newest(entries, dict.fromkeys((f"l{number}" for number in range(100)), math.inf))

    patch.setattr(beginning, "_find_newest_checkpoint", faulty)


def no_compare_and_set_of_steps(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: book.FencedAppender, payload: bytes) -> int:
        self.last = (await self._bus.publish(self._subject, payload)).sequence
        return self.last

    patch.setattr(book.FencedAppender, "_append", faulty)


def staleness_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool.GroupPool, "lag", lambda self, group, step: 0)


def replaced_learner_not_told(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: book.FencedAppender) -> None:
        await anyio.sleep_forever()

    patch.setattr(book.FencedAppender, "watch", faulty)


def versions_read_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: publication.Publication, started: Any) -> dict[int, int]:
        versions = await publication.read_published_versions(self._bus, self._subjects, self._policy)
        await anyio.sleep(1)
        await self._appender.take_over(started)
        self.version = max(versions, default=-1)
        return versions

    patch.setattr(publication.Publication, "fence", faulty)


def idle_timer_runs_during_a_step(patch: pytest.MonkeyPatch) -> None:
    """Idleness is counted from the beginning of the last call instead of its end."""
    time_limit = Stages.time_limit

    @contextmanager
    def faulty(self: Stages, stage: str, seconds: float, **options: Any) -> Iterator[None]:
        started = anyio.current_time()
        with time_limit(self, stage, seconds, **options):
            yield
        self.ended_at = started

    patch.setattr(Stages, "time_limit", faulty)


def trimmed_content_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A learner that resumes behind its newest checkpoint knows of no archive."""
    patch.setattr(actions, "read_archived_entries", lambda folder, sequences, run: {})


PLANTS: dict[Plant, tuple[int, str]] = {
    ack_before_result: (1, "a request is acked after its result"),
    no_fencing: (2, "only the newest attempt finishes"),
    deliveries_as_attempts: (2, "attempts are numbered without gaps"),
    no_compare_and_set_of_results: (2, "one result per episode, and nothing after it"),
    no_compare_and_set_of_claims: (2, "attempts are numbered without gaps"),
    claim_without_looking: (3, "every failure has a cause"),
    lease_not_extended: (1, "no worker takes over from a healthy one"),
    close_not_shielded: (3, "close runs to its end"),
    result_before_close: (1, "close runs before the result is stored"),
    failure_as_reward_zero: (4, "the reward is the verifier's"),
    one_slot_too_many: (1, "in_flight <= slots"),
    stale_history_accepted: (7, "tokens are sampled upon the recorded history"),
    no_compare_and_set_of_actions: (2, "one action per turn"),
    observation_acked_before_its_action: (1, "an observation is acked after its action"),
    late_action_not_looked_up: (9, "a superseded attempt stops"),
    rejected_version_given_up: (11, "a rejected version is tried again"),
    settled_as_of_the_checkpoint_instead_of_the_step: (5, "a checkpoint says what is settled"),
    newest_checkpoint_of_any_lineage: (76, "a lineage begins at a stored checkpoint"),
    no_compare_and_set_of_steps: (7, "version numbers never repeat"),
    staleness_ignored: (7, "staleness is bounded"),
    replaced_learner_not_told: (29, "a replaced learner ends"),
    versions_read_before_the_fence: (91, "version numbers never repeat"),
    trimmed_content_not_looked_for: (20, "no fault ends a worker"),
    idle_timer_runs_during_a_step: (7, "every failure has a cause"),
}
"""Faults, the first seed that found each when it was planted, and the invariant that it broke."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_simulation_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the invariant that names the fault, within the first 200 seeds.

    The seed that found it last time comes first: when it still does, nothing else has to run.
    """
    first, invariant = PLANTS[plant]
    assert first in SEEDS
    plant(monkeypatch)
    assert any(invariant in find_violated(seed) for seed in (first, *SEEDS)), f"none of {len(SEEDS)} seeds shows it"


def find_violated(seed: int) -> set[str]:
    """The invariants that are violated."""
    return {violation.invariant for violation in run_seed(seed).violations}
