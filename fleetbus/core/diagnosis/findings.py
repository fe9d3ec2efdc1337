"""The words of a diagnosis: findings by kind, the numbers that were looked at, and the report of both. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fleetbus.core.diagnosis.intervals import Interval


class Kind(NamedTuple):
    """One thing that can be wrong: what it means, the unit of its size, and what to do about it, one sentence."""

    meaning: str
    unit: str
    advice: str


KINDS: dict[str, Kind] = {
    "prompt_differs": Kind(
        "a replica makes other tokens of the same messages and tools", "share of its first prompts",
        "start the replica again with the chat template and tokenizer of the others (run.model, inference.chat_template).",
    ),
    "replica_differs": Kind(
        "one replica's log-probabilities are further from the trainer's than those of the others", "nats per token more",
        "drain the replica (`fleetbus drain`), and compare its version of the weights, dtype and engine with the others'.",
    ),
    "sampling_settings": Kind(
        "episodes were requested with other sampling settings than training is computed with", "share of episodes",
        "set episode.temperature for sampler and trainer alike, and leave top_p, top_k, min_p and penalties at their defaults.",
    ),
    "wrong_temperature": Kind(
        "tokens were sampled at another temperature than the log says", "nats per token",
        "let the engine sample at the temperature of the request and return log-probabilities under it.",
    ),
    "old_weights": Kind(
        "the engine samples with older weights than those that it names", "nats per token",
        "see in the log of the inference worker if it loads each version, and start it again.",
    ),
    "engine_mismatch": Kind(
        "sampler and trainer give the same tokens other log-probabilities under the same weights", "nats per token",
        "compute both in the same precision (inference.head_dtype, trainer.head_precision), or set "
        "algorithm.rollout_correction = tis.",
    ),
    "lag": Kind(
        "tokens are older, in versions, than the settings allow", "versions",
        "add inference workers, or request less ahead (learner.max_staleness, learner.stale_groups = wait).",
    ),
    "exploding_update": Kind(
        "steps change the policy too much", "times its bound",
        "lower learner.learning_rate, then resume from a checkpoint before this step (learner.restart_from).",
    ),
    "bad_worker": Kind(
        "one environment worker fails more often than the others", "share of its episodes more",
        "drain the worker (`fleetbus drain`), and read why its episodes failed (`fleetbus episodes --error`).",
    ),
    "replica_scores_less": Kind(
        "episodes of one replica get less reward than those of the others on the same tasks", "reward less",
        "drain the replica (`fleetbus drain`), and compare its engine, template and weights with the others'.",
    ),
    "tasks_dropped": Kind(
        "some tasks lose far more of their episodes than the others, so that they are hardly trained", "share lost more",
        "raise the limits of time or learner.max_staleness, or set learner.stale_groups = wait.",
    ),
    "exclusion_bias": Kind(
        "what is left out of training would have got another reward than what is trained", "reward",
        "see which reason leaves them out (`fleetbus audit`), and mend that reason before judging the curve.",
    ),
    "sudden_phrase": Kind(
        "rewarded episodes of many tasks suddenly share a phrase that no prompt has and that was rare before",
        "share of rewarded episodes",
        "read some of them; if the phrase is no form that was asked for, try the grader with `fleetbus probe`.",
    ),
    "reward_follows_length": Kind(
        "of two episodes of a group the longer one gets more reward", "correlation",
        "read the longest and the shortest episodes of a group, and correct the verifier (`fleetbus regrade` tries another).",
    ),
    "unsolvable_tasks": Kind(
        "tasks that were never solved, although the others are", "share of tasks",
        "play one by hand or with a stronger model, and remove the tasks that cannot be solved.",
    ),
    "all_wrong_groups": Kind(
        "groups in which no episode succeeds: no token of theirs is learned from", "share of groups",
        "use easier tasks, partial rewards or larger groups (learner.group_size), and check the verifier.",
    ),
    "all_right_groups": Kind(
        "groups in which every episode succeeds: there is nothing left to learn from them", "share of groups",
        "stop the run, or use harder tasks.",
    ),
    "truncation": Kind(
        "episodes end because turns or tokens are used up", "share of episodes",
        "raise episode.max_tokens, episode.max_episode_tokens or episode.max_turns.",
    ),
    "length_drift": Kind(
        "episodes became longer or shorter without more success", "times the length at the start",
        "read episodes from before and after this step, and see if the reward pays for length.",
    ),
    "entropy_collapse": Kind(
        "the policy is nearly deterministic without being right", "times the entropy at the start",
        "resume from before this step with a higher learner.clip_ratio_high or an algorithm.entropy_coefficient.",
    ),
    "entropy_explosion": Kind(
        "the policy became far more random than it was", "times the entropy at the start",
        "lower learner.learning_rate, and resume from a checkpoint before this step (learner.restart_from).",
    ),
    "reward_stopped": Kind(
        "the reward has not moved for many steps, and is not at its end", "reward in all these steps",
        "see the other findings first; then try other tasks, larger groups or another learner.learning_rate.",
    ),
    "slower_steps": Kind(
        "a step takes longer than at the start of the run", "times the time at the start",
        "mend the part that grew: start workers again that are gone, see the slowest stage (`fleetbus usage`), or raise ahead.",
    ),
}  # fmt: skip
"""In the order in which they are shown: causes come before what follows from them."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong as of the newest step, with the ``step`` at which it began, and its size with an interval of 95 %
    in ``unit``. ``subject`` is the worker or replica that it is about, if it is about one. ``time_ns``: when the log got that
    step, since 1970; 0: unknown."""

    kind: str
    meaning: str
    step: int
    size: Interval
    unit: str
    evidence: str
    advice: str
    subject: str = ""
    time_ns: int = 0


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the run over its newest ``steps`` steps that have it, with an interval of 95 %. It is a finding where it
    has been beyond ``bound`` since some step, for certain."""

    name: str
    size: Interval
    steps: int
    bound: float


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """``findings`` in the order of `KINDS`. ``unmeasured`` says what the log does not hold."""

    first_step: int
    last_step: int
    episodes: int
    findings: tuple[Finding, ...]
    measures: tuple[Measure, ...]
    unmeasured: tuple[str, ...]


def make_finding(kind: str, *, step: int, size: Interval, evidence: str, subject: str = "") -> Finding:
    """A finding with the words of its kind."""
    meaning, unit, advice = KINDS[kind]
    return Finding(
        kind=kind, meaning=meaning, step=step, size=size, unit=unit, evidence=evidence, advice=advice, subject=subject
    )


def sort_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """In the order of `KINDS`, those of one kind by their steps."""
    order = list(KINDS)
    return tuple(sorted(findings, key=lambda each: (order.index(each.kind), each.step, each.subject)))
