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
import fleetbus_workers.learner.resume as resume
import fleetbus_workers.learner.worker as learner
from fleetbus import actions
from fleetbus.core.claims import EpisodeState
from fleetbus.leases import Leases
from fleetbus_schemas import Action, AttemptStarted, EpisodeFinished, encode
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages
from fleetbus_workers.learner.checkpoint_choice import Choice
from fleetbus_workers.learner.checkpoints import list_checkpoints, read_checkpoint
from fleetbus_workers.simulation.run import Report, run_seed

SEEDS = range(1, 301)
COMPARED_SEEDS = 10
"""How many seeds tell whether a plant that was not found changes anything."""

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
    read = attempts.read_episode_state  # type: ignore[attr-defined]

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
    async def faulty(self: answers.ObservationHandler, observation: Any, action: Action) -> bool:
        await self._bus.publish(self._subjects.action(observation.environment_lane, observation.episode_id), encode(action))
        return True

    patch.setattr(answers.ObservationHandler, "_store_action", faulty)


def observation_acked_before_its_action(patch: pytest.MonkeyPatch) -> None:
    made = answers.ObservationHandler._build_action

    async def faulty(self: answers.ObservationHandler, observation: Any, delivery: Any) -> Action:
        turn = f"{observation.episode_id}.{observation.attempt}.{observation.turn}"
        await self._ack(f"{turn}.{delivery.message.sequence}")
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
        discarded = (exclusion.episode_id for group in self._pool._excluded for exclusion in group)
        await store(self, msgspec.structs.replace(checkpoint, settled=(*checkpoint.settled, *discarded)))

    patch.setattr(learner.Learner, "_store_checkpoint", faulty)


def newest_file_instead_of_the_log(patch: pytest.MonkeyPatch) -> None:
    """Resume follows the newest checkpoint that lies in the folder, whether or not the log names it."""
    choose = resume.choose_checkpoint  # type: ignore[attr-defined]

    async def faulty(lineages: Any, stored: Any, *, folder: Any, **options: Any) -> Choice:
        choice = await choose(lineages, stored, folder=folder, **options)
        written = [f"l{number}-{step:06d}" for number, step, whole in list_checkpoints(folder) if whole]
        checkpoint = read_checkpoint(folder / written[-1]) if written else None
        if checkpoint is None or choice.restart:
            return choice
        return msgspec.structs.replace(choice, checkpoint=checkpoint, path=folder / written[-1])

    patch.setattr(resume, "choose_checkpoint", faulty)


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
        versions = await publication.read_published_versions(self._bus, self._subjects, self._policy)  # type: ignore[attr-defined]
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
    no_fencing: (9, "only the newest attempt finishes"),
    deliveries_as_attempts: (5, "attempts are numbered without gaps"),
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
    settled_as_of_the_checkpoint_instead_of_the_step: (3, "a checkpoint says what is settled"),
    newest_file_instead_of_the_log: (58, "a lineage begins at a stored checkpoint"),
    no_compare_and_set_of_steps: (7, "version numbers never repeat"),
    staleness_ignored: (7, "staleness is bounded"),
    replaced_learner_not_told: (38, "a replaced learner ends"),
    versions_read_before_the_fence: (119, "version numbers never repeat"),
    trimmed_content_not_looked_for: (21, "no fault ends a worker"),
    idle_timer_runs_during_a_step: (7, "every failure has a cause"),
}
"""Faults, the first seed that found each when it was planted, and the invariant that it broke."""


SAMPLE: tuple[Plant, ...] = (
    ack_before_result,
    no_compare_and_set_of_claims,
    lease_not_extended,
    close_not_shielded,
    failure_as_reward_zero,
    one_slot_too_many,
    stale_history_accepted,
    no_compare_and_set_of_actions,
    observation_acked_before_its_action,
)
"""Faults that nearly any seed shows, of every role: seconds each, so they are planted in every run of the tests."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", SAMPLE, ids=lambda plant: plant.__name__)
def test_the_simulation_finds(plant: Plant) -> None:
    """By the invariant that names the fault. The seed that found it last time comes first: when it still does, nothing else
    has to run."""
    assert_found(plant)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant not in SAMPLE], ids=lambda plant: plant.__name__)
def test_the_simulation_finds_at_some_seed(plant: Plant) -> None:
    """As above; only certain schedules of faults show these."""
    assert_found(plant)


def test_a_plant_that_changes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes_nothing(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(answers.ObservationHandler, "_never_called", None, raising=False)

    monkeypatch.setitem(PLANTS, changes_nothing, (1, "one action per turn"))
    with pytest.raises(AssertionError, match="changes the trace of 0 of 1 seeds"):
        assert_found(changes_nothing, seeds=range(1, 2))


def test_a_plant_whose_signature_is_out_of_date_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def misfits(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(book.FencedAppender, "append", lambda self: None)

    monkeypatch.setitem(PLANTS, misfits, (1, "no fault ends a worker"))
    with pytest.raises(AssertionError, match="misfits does not fit what it replaces"):
        assert_found(misfits)


def assert_found(plant: Plant, seeds: range = SEEDS) -> None:
    """The first seed that shows the fault passes without it, and its trace is another one."""
    first, invariant = PLANTS[plant]
    tried: dict[int, Report] = {}
    for seed in dict.fromkeys((first, *seeds)):
        tried[seed] = planted = run_planted(plant, seed)
        if invariant in {violation.invariant for violation in planted.violations}:
            sound = run_seed(seed)
            assert sound.passed, f"seed {seed} fails without any plant: {sound.violations}"
            assert sound.trace_hash != planted.trace_hash, f"{plant.__name__} changes nothing at seed {seed}"
            return
    compared = tuple(tried)[:COMPARED_SEEDS]
    changed = sum(run_seed(seed).trace_hash != tried[seed].trace_hash for seed in compared)
    raise AssertionError(
        f"none of {len(tried)} seeds shows {plant.__name__}, which changes the trace of {changed} of {len(compared)} seeds"
    )


def run_planted(plant: Plant, seed: int) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        report = run_seed(seed)
    misfits = [each.detail for each in report.violations if "TypeError" in each.detail or "AttributeError" in each.detail]
    assert not misfits, f"{plant.__name__} does not fit what it replaces: {misfits[0]}"
    return report
