"""A check that cannot fail is worth nothing: each fault planted here is one that a worker could have; the simulation finds it.

Faults are planted by patching the workers' own code for the length of a test; production code has no switches for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

import fleetbus_workers.inference.observation_handler as answers
import fleetbus_workers.learner.journal as book
from tests.simulation.run import Report, run_seed
from tests.simulation.scenario.shape import FaultSet, PowerLoss, Scenario, ScheduledFault
from tests.simulation.seed_pool import run_safely
from tests.support import planted_in_ahead as ahead
from tests.support import planted_in_episodes as episodes
from tests.support import planted_in_learners as learners
from tests.support import planted_in_retention as retention
from tests.support import planted_in_seats as seats
from tests.support import planted_in_segments as segments
from tests.support import planted_in_sessions as sessions
from tests.support import planted_in_training as training

pytestmark = pytest.mark.integration

SEEDS = range(1, 301)
COMPARED_SEEDS = 10
"""How many seeds tell whether a plant that was not found changes anything."""

Plant = Callable[[pytest.MonkeyPatch], None]


class Found(NamedTuple):
    """The seed that found a plant when it was planted, and the invariant that it broke."""

    seed: int
    invariant: str
    faults: FaultSet = "all"


PLANTS: dict[Plant, Found] = {
    episodes.ack_before_result: Found(1, "a request is acked after its result", "usual"),
    episodes.no_fencing: Found(9, "only the newest attempt finishes", "usual"),
    episodes.deliveries_as_attempts: Found(5, "attempts are numbered without gaps", "usual"),
    episodes.no_compare_and_set_of_results: Found(2, "one result per episode, and nothing after it", "usual"),
    episodes.no_compare_and_set_of_claims: Found(2, "attempts are numbered without gaps", "usual"),
    episodes.claim_without_looking: Found(3, "every failure has a cause", "usual"),
    episodes.lease_not_extended: Found(1, "no worker takes over from a healthy one", "usual"),
    episodes.close_not_shielded: Found(6, "close runs to its end", "usual"),
    episodes.result_before_close: Found(1, "close runs before the result is stored", "usual"),
    episodes.failure_as_reward_zero: Found(4, "the reward is the verifier's", "usual"),
    episodes.one_slot_too_many: Found(1, "in_flight <= slots", "usual"),
    episodes.stale_history_accepted: Found(7, "tokens are sampled upon the recorded history", "usual"),
    episodes.no_compare_and_set_of_actions: Found(2, "one action per turn", "usual"),
    episodes.observation_acked_before_its_action: Found(1, "an observation is acked after its action", "usual"),
    episodes.late_action_not_looked_up: Found(9, "a superseded attempt stops"),
    episodes.rejected_version_given_up: Found(11, "a rejected version is tried again", "usual"),
    episodes.idle_timer_runs_during_a_step: Found(32, "every failure has a cause", "usual"),
    episodes.conflict_taken_for_stored: Found(9, "a request is acked after its result"),
    episodes.deadline_ignored: Found(23, "an outcome by deadline and grace", "swarm"),
    episodes.drain_ignored: Found(1, "a drained worker leaves"),
    episodes.bus_time_of_the_workers_own_clock: Found(9, "an observation is acked after its action", "swarm"),
    episodes.seed_of_the_first_turn: Found(1, "tokens are sampled upon the recorded history"),
    training.settled_as_of_the_checkpoint_instead_of_the_step: Found(5, "a checkpoint says what is settled", "usual"),
    training.no_compare_and_set_of_steps: Found(11, "version numbers never repeat", "usual"),
    training.staleness_ignored: Found(5, "staleness is bounded", "usual"),
    training.replaced_learner_not_told: Found(90, "a replaced learner ends", "usual"),
    training.versions_read_before_the_fence: Found(203, "version numbers never repeat", "usual"),
    training.trimmed_content_not_looked_for: Found(40, "a finished rollout is not lost"),
    training.unreadable_checkpoint_means_the_start: Found(9, "a lineage begins at a stored checkpoint"),
    training.fresh_weights_after_a_restart: Found(9, "an engine loads what was published"),
    training.exclusions_forgotten: Found(1, "nothing unsettled lies below the floor"),
    training.floor_above_open_requests: Found(11, "nothing unsettled lies below the floor"),
    training.single_episodes_trained: Found(3, "a trained group has a baseline"),
    training.unsettled_content_trimmed: Found(1, "an observation is acked after its action"),
    training.archive_loses_an_entry: Found(1, "every entry is in the log or in the archive"),
    training.failed_sync_ignored: Found(33, "every entry is in the log or in the archive"),
    training.first_weights_uploaded_again: Found(1, "an engine loads what was published"),
    training.tasks_begin_anew_with_each_learner: Found(13, "every task comes once per epoch", "usual"),
    training.version_announced_before_its_step: Found(1, "a version says which step made it"),
    retention.full_disk_not_waited_for: Found(6, "no fault ends a worker"),
    retention.floor_not_read: Found(5, "one environment per attempt", "usual"),
    retention.removed_before_the_floor_is_raised: Found(5, "a request is stored once", "usual"),
    retention.floor_above_open_groups: Found(20, "nothing open lies below the floor", "usual"),
    seats.turn_of_another_seat: Found(4, "a turn belongs to the seat that acted", "usual"),
    seats.rewards_exchanged: Found(1, "a seat's reward is the verifier's", "usual"),
    seats.unrewarded_seat_trained: Found(1, "a result refers to the history of its claims", "usual"),
    seats.seat_lost_in_a_takeover: Found(17, "a turn belongs to the seat that acted", "usual"),
    seats.seat_in_the_context_of_another: Found(4, "a trained group has a baseline", "usual"),
    seats.seats_compared_with_each_other: Found(1, "an episode's reward is counted once", "usual"),
    seats.reward_of_the_episode_for_each_seat: Found(1, "an episode's reward is counted once", "usual"),
    seats.seat_of_another_policy_rewarded: Found(4, "a seat's reward is the verifier's", "usual"),
    seats.other_policy_forgotten: Found(4, "a turn is asked of the policy of its seat", "usual"),
    seats.limit_counted_anew_in_a_takeover: Found(8, "the audit balances", "usual"),
    seats.other_policy_forgotten_in_a_takeover: Found(15, "a turn is asked of the policy of its seat", "usual"),
    learners.turns_of_both_policies_trained: Found(1, "a learner trains the turns of its policy only", "learners"),
    learners.reward_of_the_other_policy: Found(1, "an episode's reward is counted once", "learners"),
    learners.retention_by_one_of_two_policies: Found(1, "nothing unsettled is passed by the floor", "learners"),
    segments.token_trained_twice: Found(1, "a sampled token is trained once", "usual"),
    segments.leaf_lost_in_a_takeover: Found(5, "every sampled token is trained", "usual"),
    segments.reward_counted_per_leaf: Found(1, "an episode's reward is counted once", "usual"),
    segments.segment_begun_upon_its_own_hash: Found(1, "every failure has a cause", "usual"),
    ahead.tokens_of_another_turn: Found(42, "tokens are sampled upon the recorded history", "usual"),
    ahead.answers_exchanged: Found(42, "a result refers to the history of its claims", "usual"),
    ahead.answer_lost_in_a_takeover: Found(50, "a result refers to the history of its claims", "usual"),
    ahead.turn_before_not_awaited: Found(42, "an action stands on all turns before it", "usual"),
    sessions.call_among_restored_ones: Found(2, "a session fails by its end in the log only"),
    sessions.answer_not_recorded: Found(1, "an answer is recorded before it is given"),
    sessions.repeated_call_executed_again: Found(3, "a call of a session is executed once"),
    sessions.session_left_open: Found(1, "a session's environment is closed exactly once"),
    sessions.sessions_without_slots: Found(3, "sessions <= session_slots"),
    sessions.restored_without_steps: Found(3, "a step of a session follows all steps before"),
}
"""Faults, and what found them. That seed comes first: when it still does, nothing else has to run."""


SAMPLE: tuple[Plant, ...] = (
    retention.floor_not_read,
    episodes.ack_before_result,
    episodes.no_compare_and_set_of_claims,
    episodes.lease_not_extended,
    episodes.close_not_shielded,
    episodes.failure_as_reward_zero,
    episodes.one_slot_too_many,
    episodes.no_compare_and_set_of_actions,
    episodes.observation_acked_before_its_action,
    episodes.bus_time_of_the_workers_own_clock,
    training.floor_above_open_requests,
    training.tasks_begin_anew_with_each_learner,
    training.exclusions_forgotten,
    learners.turns_of_both_policies_trained,
    learners.reward_of_the_other_policy,
    learners.retention_by_one_of_two_policies,
    ahead.tokens_of_another_turn,
    ahead.answers_exchanged,
    seats.rewards_exchanged,
    seats.seat_in_the_context_of_another,
    seats.seat_of_another_policy_rewarded,
    segments.token_trained_twice,
    segments.reward_counted_per_leaf,
    sessions.answer_not_recorded,
    sessions.session_left_open,
)
"""Faults that nearly any seed shows, of every role: a second each, so they are planted in every run of the tests."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", SAMPLE, ids=lambda plant: plant.__name__)
def test_the_simulation_finds(plant: Plant) -> None:
    """By the invariant that names the fault."""
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

    monkeypatch.setitem(PLANTS, changes_nothing, Found(1, "one action per turn", "usual"))
    with pytest.raises(AssertionError, match="changes the trace of 0 of 1 seeds"):
        assert_found(changes_nothing, seeds=range(1, 2))


def test_a_plant_whose_signature_is_out_of_date_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def misfits(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(book.FencedAppender, "append", lambda self: None)

    monkeypatch.setitem(PLANTS, misfits, Found(1, "no fault ends a worker", "usual"))
    with pytest.raises(AssertionError, match="misfits does not fit what it replaces"):
        assert_found(misfits)


def assert_found(plant: Plant, seeds: range = SEEDS) -> None:
    """The first seed that shows the fault passes without it, and its trace is another one."""
    first, invariant, faults = PLANTS[plant]
    tried: dict[int, Report] = {}
    for seed in dict.fromkeys((first, *seeds)):
        tried[seed] = planted = run_planted(plant, seed, faults)
        if invariant in {violation.invariant for violation in planted.violations}:
            sound = run_seed(seed, faults=faults)
            assert sound.passed, f"seed {seed} fails without any plant: {sound.violations}"
            assert sound.trace_hash != planted.trace_hash, f"{plant.__name__} changes nothing at seed {seed}"
            return
    compared = tuple(tried)[:COMPARED_SEEDS]
    changed = sum(run_seed(seed, faults=faults).trace_hash != tried[seed].trace_hash for seed in compared)
    raise AssertionError(
        f"none of {len(tried)} seeds shows {plant.__name__}, which changes the trace of {changed} of {len(compared)} seeds"
    )


def run_planted(plant: Plant, seed: int, faults: FaultSet) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        report = run_safely(seed, faults)
    misfits = [each.detail for each in report.violations if "TypeError" in each.detail or "AttributeError" in each.detail]
    assert not misfits, f"{plant.__name__} does not fit what it replaces: {misfits[0]}"
    return report


def draw_damaged_checkpoints(seed: int) -> Scenario:
    """The newest checkpoint is damaged again and again beside a recorder with a slow disk: new lineages void what was settled
    when the floor is about to pass it."""
    faults = tuple(
        ScheduledFault(
            kind="spoil_checkpoint", at=5.0 + 4.0 * number + 0.13 * seed, seconds=1.0, role="learner", pick=2 * number
        )
        for number in range(12)
    )
    return Scenario(
        seed=seed,
        steps=30,
        groups=3,
        group_size=2,
        checkpoint_every=1,
        evaluation_episodes=0,
        duplicate_window_seconds=0.0,
        blocking_seconds=0.2,
        recorder=True,
        settle_seconds=3.0,
        archive_seconds=4.0,
        fault_schedule=faults,
    )


@pytest.mark.timeout(300)
def test_a_floor_that_is_raised_over_a_lineage_that_the_recorder_has_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 16 once had a recorder that computed a floor, and expected one that it read later."""
    assert [run_seed(seed, scenario=draw_damaged_checkpoints(seed)).violations for seed in (16, 22)] == [(), ()]
    retention.floor_raised_over_an_unread_lineage(monkeypatch)
    (violation,) = run_seed(22, scenario=draw_damaged_checkpoints(22)).violations
    assert violation.invariant in ("the audit balances", "the floor never sinks")


@pytest.mark.timeout(300)
def test_an_observation_that_expires_because_the_clock_was_set_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by 20 hours and for good: what is set oftener is a cause of its own for each delivery that nobody answers."""
    clock = ScheduledFault(kind="set_clock", at=15.7, seconds=60.0, role="learner", pick=1)
    scenario = Scenario(seed=1, steps=8, groups=3, group_size=2, evaluation_episodes=0, fault_schedule=(clock,))
    assert run_seed(1, scenario=scenario).violations == ()
    episodes.observation_expired_by_a_clock_that_was_set(monkeypatch)
    violations = run_seed(1, scenario=scenario).violations
    assert {violation.invariant for violation in violations} == {"every failure has a cause"}


@pytest.mark.timeout(300)
def test_a_checkpoint_that_only_the_folder_still_knows_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log loses its last eight seconds, in which a step was trained and its checkpoint stored. A checkpoint that was merely
    not named yet is announced by the learner that begins at it, which breaks no promise."""
    loss = PowerLoss(at=25.8, lost_seconds=8.0, down_seconds=2.0)
    scenario = Scenario(
        seed=6,
        steps=12,
        groups=2,
        group_size=2,
        checkpoint_every=1,
        evaluation_episodes=0,
        blocking_seconds=0.2,
        power_losses=(loss,),
    )
    assert run_seed(6, scenario=scenario).violations == ()
    training.newest_file_instead_of_the_log(monkeypatch)
    violations = run_seed(6, scenario=scenario).violations
    assert "a checkpoint holds the last step" in {violation.invariant for violation in violations}


@pytest.mark.timeout(300)
def test_admission_that_does_not_count_what_admitted_episodes_will_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log for one step and a half, and five steps' episodes admitted at once: they fill it, and none can end."""
    scenario = Scenario(
        seed=1,
        steps=6,
        groups=8,
        max_staleness=4,
        environment_slots=64,
        inference_slots=64,
        turns=(5, 6, 7),
        recorder=True,
        settle_seconds=3.0,
        log_bytes=384 << 10,
    )
    assert run_seed(1, scenario=scenario).violations == ()
    retention.room_not_estimated(monkeypatch)
    violations = run_seed(1, scenario=scenario).violations
    assert {violation.invariant for violation in violations} == {"an outcome by deadline and grace"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_learner_that_does_not_wait_for_the_other_one_is_found(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """Seed 1 once counted a batch as trained before its version was published: what was asked for then was stale."""
    scenario = Scenario(
        seed=1,
        seats=2,
        other_seat=True,
        trained_seat=True,
        steps=6,
        groups=3,
        group_size=4,
        max_turns=8,
        turns=(6, 7),
        max_staleness=staleness,
        evaluation_episodes=0,
    )
    assert run_seed(1, scenario=scenario).violations == ()
    learners.learners_behind_not_waited_for(monkeypatch)
    violations = run_seed(1, scenario=scenario).violations
    assert {violation.invariant for violation in violations} == {"who asks for episodes waits for all learners"}


@pytest.mark.timeout(300)
def test_a_learner_that_joins_and_forgets_what_its_checkpoint_settled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both learners are killed in turn, every nine seconds, with a checkpoint after each step."""
    kills = (ScheduledFault(kind="crash", at=25.0 + 9 * n, seconds=1.0, role="learner", pick=n) for n in range(8))
    scenario = Scenario(
        seed=3,
        seats=2,
        other_seat=True,
        trained_seat=True,
        steps=8,
        groups=3,
        group_size=4,
        max_turns=8,
        turns=(3, 6, 7),
        checkpoint_every=1,
        evaluation_episodes=0,
        fault_schedule=tuple(kills),
    )
    assert run_seed(3, scenario=scenario).violations == ()
    learners.settled_episodes_trained_after_a_resume(monkeypatch)
    violations = run_seed(3, scenario=scenario).violations
    assert {violation.invariant for violation in violations} == {"an episode is settled once in the surviving lineage"}
