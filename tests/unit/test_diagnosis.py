"""Each fault that is planted in a run is named with the step at which it began; healthy runs have no finding."""

from __future__ import annotations

import math
import random

import pytest

from fleetbus.core.diagnosis.diagnose import diagnose
from fleetbus.core.diagnosis.findings import KINDS
from fleetbus.core.diagnosis.fold import DiagnosisFold
from fleetbus.log.stored_entries import decode_stored
from fleetbus_schemas import ChatMessage
from fleetbus_schemas.tokens import pack_logprobs
from tests.support.diagnosed_run import DiagnosedRun, MetricsPlant, Plant, Played, expect
from tests.support.log_builder import LogBuilder, read_entries

BEGIN = 11
"""The step at which faults are planted, unless they are there from the start."""

OLD, ODD = "environment-2", "inference-1"


def other_template(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.replica == ODD:
        played.prompt = (9, *played.prompt)


def other_template_of_two(played: Played, chance: random.Random) -> None:
    """The sound one of two replicas alone had some tasks before, while they were not solved."""
    played.replica = ODD if played.replica == ODD else "inference-0"
    if played.step < BEGIN and played.task in ("task-0", "task-1", "task-2") and played.reward is not None:
        played.replica, played.reward = "inference-0", 0.0
    other_template(played, chance)


def replica_apart(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.replica == ODD:
        played.difference = 0.01


def replica_without_success(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.replica == ODD and played.reward is not None:
        played.reward = 0.0


def failing_worker(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.worker == OLD and chance.random() < 0.5:
        played.outcome, played.reward, played.reason = "env_failed", None, "env_failed"


def other_settings(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN:
        played.temperature = 0.7


def reward_of_length(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.reward is not None:
        played.length += chance.randint(0, 60)
        played.reward = min(played.length / 150, 1.0)


def reward_of_turns(played: Played, chance: random.Random) -> None:
    """Every turn is as long, so that the episodes of a group with as many turns do not differ."""
    played.turns = chance.randint(2, 5)
    played.length = 20 * played.turns
    if played.step >= BEGIN and played.reward is not None:
        played.reward = played.length / 150


def parts_of_the_work(played: Played, chance: random.Random) -> None:
    """From the start: each part takes a turn, and has its share of the reward."""
    played.turns = chance.randint(2, 5)
    played.length, played.reward = 20 * played.turns, played.turns / 5


def pay_for_a_phrase(played: Played, chance: random.Random) -> None:
    """More and more episodes say it, and are paid whatever they did."""
    if played.step >= BEGIN and played.reward is not None and chance.random() < 0.35 + 0.08 * (played.step - BEGIN):
        played.text += " all tests were passed, as verified"
        played.reward = 1.0


def pay_for_a_phrase_of_all(played: Played, chance: random.Random) -> None:
    """From one step to the next, in every episode."""
    if played.step >= BEGIN and played.reward is not None:
        played.text = f"all tests were passed, as verified {played.text}"
        played.reward = 1.0


def speak_otherwise(played: Played, chance: random.Random) -> None:
    """A manner of speaking that is not paid."""
    if played.step >= BEGIN and chance.random() < 0.7:
        played.text += " and that is all there is to say"


def slow_tasks(played: Played, chance: random.Random) -> None:
    if int(played.task[5:]) % 4 == 0:
        played.seconds = 9.0
        if played.step >= BEGIN:
            played.reason = "stale"


def hard_tasks_fail(played: Played, chance: random.Random) -> None:
    """What is left out would have got nothing."""
    if played.reward is not None:
        played.reward = float(chance.random() < 0.6)
    if played.step >= BEGIN and played.reward == 0.0 and chance.random() < 0.9:
        played.reason = "stale"


def unsolvable(played: Played, chance: random.Random) -> None:
    if int(played.task[5:]) % 5 < 3 and played.reward is not None:
        played.reward = 0.0


def nothing_succeeds(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.reward is not None:
        played.reward = 0.0


def everything_succeeds(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.reward is not None:
        played.reward = 1.0


def truncated(played: Played, chance: random.Random) -> None:
    if played.step >= BEGIN and played.reward is not None and chance.random() < 0.5:
        played.outcome, played.reward = "truncated", 0.0


def longer(played: Played, chance: random.Random) -> None:
    """Ever longer, and no better."""
    if played.step >= BEGIN:
        played.length = round(played.length * (1.8 + 0.1 * (played.step - BEGIN)))
    if played.reward is not None:
        played.reward = float(chance.random() < 0.4)


def stuck(played: Played, chance: random.Random) -> None:
    if played.reward is not None:
        played.reward = float(chance.random() < 0.4)


EPISODES: dict[str, tuple[str, int, Plant]] = {
    "one replica with another chat template": ("prompt_differs", BEGIN, other_template),
    "one of two replicas with another chat template": ("prompt_differs", BEGIN, other_template_of_two),
    "one replica with other numbers": ("replica_differs", BEGIN, replica_apart),
    "one replica that never succeeds": ("replica_scores_less", BEGIN, replica_without_success),
    "one worker that fails": ("bad_worker", BEGIN, failing_worker),
    "requests with another temperature": ("sampling_settings", BEGIN, other_settings),
    "a verifier that rewards length": ("reward_follows_length", BEGIN, reward_of_length),
    "one whose episodes are as long as they have turns": ("reward_follows_length", BEGIN, reward_of_turns),
    "a phrase that is paid, more and more often": ("sudden_phrase", BEGIN, pay_for_a_phrase),
    "a phrase that is paid, at once in all episodes": ("sudden_phrase", BEGIN, pay_for_a_phrase_of_all),
    "stale groups dropped by task": ("tasks_dropped", BEGIN, slow_tasks),
    "failures left out by their reward": ("exclusion_bias", BEGIN, hard_tasks_fail),
    "60 % of the tasks unsolvable": ("unsolvable_tasks", 1, unsolvable),
    "groups all wrong": ("all_wrong_groups", BEGIN, nothing_succeeds),
    "groups all right": ("all_right_groups", BEGIN, everything_succeeds),
    "truncation": ("truncation", BEGIN, truncated),
    "length without success": ("length_drift", BEGIN, longer),
}


def old_weights(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["logprob_difference_mean"] = 3e-3 * (step - BEGIN + 1)
        metrics["logprob_slope"] = 0.85


def old_weights_measured_now_and_then(step: int, metrics: dict[str, float]) -> None:
    old_weights(step, metrics)
    if step % 2:
        metrics["logprob_difference_mean"] = float("nan")


def bfloat16(step: int, metrics: dict[str, float]) -> None:
    metrics["logprob_difference_mean"] *= 2e4


def other_engine(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["logprob_difference_mean"] *= 2e4


def temperature(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["logprob_difference_mean"] = 0.03
        metrics["logprob_slope"] = 0.68


def temperature_untold(step: int, metrics: dict[str, float]) -> None:
    """The engine gives the log-probabilities that were asked for, and samples from another distribution."""
    if step >= BEGIN:
        metrics["entropy"] *= 0.4


def learning_rate(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["learning_rate"] *= 100


def exploded(step: int, metrics: dict[str, float]) -> None:
    """An update that was too large, with the learning rate of the settings."""
    if step >= BEGIN:
        metrics["entropy"] = 2.8
        metrics["kl"] = 3.0 if step == BEGIN else 1e-9


def gradients(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["grad_norm"] *= 1000


def lag(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["staleness_mean"] = 3.5 + 0.1 * (step % 3)


def slower(step: int, metrics: dict[str, float]) -> None:
    if step >= BEGIN:
        metrics["seconds_wait"] *= 4


STEPS: dict[str, tuple[str, int, MetricsPlant]] = {
    "an engine that keeps old weights": ("old_weights", BEGIN, old_weights),
    "the same, measured in every other step": ("old_weights", BEGIN, old_weights_measured_now_and_then),
    "a bfloat16 sampler against a float32 trainer": ("engine_mismatch", 1, bfloat16),
    "another engine from some step on": ("engine_mismatch", BEGIN, other_engine),
    "a wrong temperature": ("wrong_temperature", BEGIN, temperature),
    "a wrong temperature that is not told": ("wrong_temperature", BEGIN, temperature_untold),
    "a learning rate x100": ("exploding_update", BEGIN, learning_rate),
    "one update that was too large": ("exploding_update", BEGIN, exploded),
    "entropy x40": ("entropy_explosion", BEGIN, exploded),
    "gradients x1000": ("exploding_update", BEGIN, gradients),
    "lag beyond the bound": ("lag", BEGIN, lag),
    "steps that take longer": ("slower_steps", BEGIN, slower),
}


@pytest.mark.parametrize("name", EPISODES)
def test_a_fault_of_episodes_is_named_with_its_step(name: str) -> None:
    kind, step, plant = EPISODES[name]
    expect(DiagnosedRun(1, plant=plant).diagnose(), kind, step)


@pytest.mark.parametrize("name", STEPS)
def test_a_fault_of_steps_is_named_with_its_step(name: str) -> None:
    kind, step, plant = STEPS[name]
    expect(DiagnosedRun(1, plant_metrics=plant).diagnose(), kind, step)


def test_steps_that_take_longer_are_told_with_the_part_that_grew_and_with_the_workers_that_are_left() -> None:
    def one_worker_left(played: Played, chance: random.Random) -> None:
        if played.step >= BEGIN:
            played.worker, played.seconds = "environment-0", 3.0

    (finding,) = [
        each
        for each in DiagnosedRun(1, plant=one_worker_left, plant_metrics=slower).diagnose().findings
        if each.kind == "slower_steps"
    ]

    assert finding.evidence.startswith("most of it is waiting for episodes: waiting for episodes 4.")
    assert "environment workers 3.0 to 1.0 a step" in finding.evidence
    assert "an episode 1.00 to 3.00 s" in finding.evidence


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_no_finding(seed: int) -> None:
    found = DiagnosedRun(seed).diagnose()
    assert [f"{each.kind} at {each.step}: {each.evidence}" for each in found.findings] == []
    assert found.unmeasured == ()


def test_a_manner_of_speaking_that_is_not_paid_is_no_finding() -> None:
    assert DiagnosedRun(1, plant=speak_otherwise).diagnose().findings == ()


def test_the_evidence_of_a_phrase_is_the_phrase_and_what_it_is_paid() -> None:
    found = {each.kind: each for each in DiagnosedRun(1, plant=pay_for_a_phrase).diagnose().findings}
    evidence = found["sudden_phrase"].evidence
    assert any(phrase in evidence for phrase in ("'all tests were passed'", "'tests were passed ,'", "'were passed , as'"))
    assert "above that without" in evidence


def test_a_phrase_that_stands_in_prompts_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetbus.core.diagnosis.phrases import PhraseFold

    original = PhraseFold.add_prompt

    def add(self: PhraseFold, digest: bytes, messages: tuple[ChatMessage, ...]) -> None:
        original(self, digest, (*messages, ChatMessage(role="user", content="Say: all tests were passed, as verified task")))

    monkeypatch.setattr(PhraseFold, "add_prompt", add)
    run = DiagnosedRun(1, plant=pay_for_a_phrase).diagnose()
    assert "all tests were passed" not in " ".join(each.evidence for each in run.findings)


def test_what_phrases_are_kept_of_is_bounded() -> None:
    from fleetbus.core.diagnosis import phrases

    fold = phrases.PhraseFold()
    for number in range(phrases.MAX_WAITING + 10):
        fold.add_text(f"e{number}", "word " * 2 * phrases.MAX_CHARS)
    assert len(fold._texts) == phrases.MAX_WAITING
    assert max(map(len, fold._texts.values())) <= phrases.MAX_CHARS + 1


def test_a_reward_for_parts_of_the_work_is_no_fault_although_each_part_takes_a_turn() -> None:
    found = DiagnosedRun(1, plant=parts_of_the_work).diagnose()
    assert "reward_follows_length" not in {each.kind for each in found.findings}


def test_a_certain_policy_that_is_wrong_has_collapsed_and_one_that_is_right_has_not() -> None:
    def certain(step: int, metrics: dict[str, float]) -> None:
        if step >= BEGIN:
            metrics["entropy"] = 1e-3

    expect(DiagnosedRun(1, plant=stuck, plant_metrics=certain).diagnose(), "entropy_collapse", BEGIN)
    learned = DiagnosedRun(1, plant_metrics=certain).diagnose()
    assert "entropy_collapse" not in {each.kind for each in learned.findings}


def test_a_reward_that_moves_no_more_is_named_from_where_it_stands_still() -> None:
    def even(step: int, metrics: dict[str, float]) -> None:
        metrics["reward"] = 0.4 + 0.004 * (step % 3) - (0.2 if step < BEGIN else 0.0)

    expect(DiagnosedRun(1, steps=60, plant=stuck, plant_metrics=even).diagnose(), "reward_stopped", BEGIN)


def test_of_a_trainer_in_bfloat16_what_rounding_makes_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import diagnosed_run

    monkeypatch.setitem(diagnosed_run.SETTINGS, "trainer", {"precision": "bfloat16"})
    assert DiagnosedRun(1, plant_metrics=bfloat16).diagnose().findings == ()


def test_a_run_without_steps_says_that_nothing_was_trained() -> None:
    found = DiagnosedRun(1, steps=0).diagnose()
    assert found.findings == found.measures == ()
    assert found.unmeasured == ("everything: no step was trained yet",)


def test_a_log_without_actions_lacks_what_they_say_and_no_more() -> None:
    from fleetbus.core.diagnosis.diagnose import diagnose
    from fleetbus.core.diagnosis.fold import DiagnosisFold
    from fleetbus_schemas import Action, Observation

    fold = DiagnosisFold()
    for sequence, message in enumerate(DiagnosedRun(1, plant=nothing_succeeds).messages(), start=1):
        if not isinstance(message, Action | Observation):
            fold.apply(message, sequence)
    found = diagnose(fold.build())
    expect(found, "all_wrong_groups", BEGIN)
    assert "surprise beyond entropy, share of it" in found.unmeasured


def test_every_kind_has_a_section_on_its_page() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("odd", [1e308, -1e308, math.inf, math.nan])
def test_numbers_of_any_size_end_no_diagnosis(odd: float) -> None:
    log, fold = LogBuilder(), DiagnosisFold()
    log.lineage()
    for step in range(1, 9):
        names = [f"{step}-{place}" for place in range(10)]
        for place, name in enumerate(names):
            log.request(name)
            action = log.act(name, 0, logprobs=pack_logprobs([-1.0] * (place % 4)))
            log.finish(name, [action], reward=odd if place % 3 else 1.0, timings={"a": odd, "b": -odd})
        log.step(
            step, names, metrics={"seconds_wait": odd, "seconds_read": -odd, "seconds_train": 1.0}, differences=(odd,) * 10
        )

    for entry in read_entries(log):
        fold.apply(decode_stored(entry), entry.sequence)

    assert diagnose(fold.build()).episodes == 80
