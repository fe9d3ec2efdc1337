"""Detects that training has nothing left to learn from: a fold of the learner's journal. Pure; times are server time in
nanoseconds.

A group whose rewards are all equal gives every one of its tokens an advantage of zero. A policy that collapsed plays such
groups only, so that no gradient will ever bring it back, and all else looks healthy: episodes end, steps are trained. What
decides is the advantages that a step was trained with, not its rewards: shaping and credit per turn may make equal ones differ.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from fleetbus_schemas import LineageStarted, Message, StepTrained

MANY_GROUPS = 64
"""So many groups in a row without an advantage are no bad luck. Of a policy that succeeds once in 30 tries, with 8 episodes per
group, 64 groups without a single success come once in 30 million."""

FEWEST_STEPS = 3
WINDOW_EPISODES = 256
"""Success is taken as the mean of the newest steps that hold so many episodes, `FEWEST_STEPS` at least."""

ZERO_ADVANTAGE = 1e-6
SOLVED = 0.9
"""Of groups with equal rewards, when so many of their episodes succeed, the run is at its end and not lost."""

LEARNED = 0.2
"""A success that had been reached before it can be said to have fallen."""

LOST_SHARE = 0.1
"""A success rate fell if it is at most this share of the best."""

NEARLY_BEST = 0.8
"""The last step with such a share of the best success is where it began to fall."""


MISMATCH = 0.05
"""Mean difference between the log-probabilities of sampler and trainer for the same tokens under the same weights: beyond it
what is trained is not what was sampled. With heads in bfloat16 it was .026, with the same arithmetic on both sides 1e-6."""


class SignalDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """``no_signal`` and ``fell``: the policy is lost, or never begins; ``solved``: a healthy end; ``mismatch``: sampler and
    trainer compute other log-probabilities. ``since_ns`` is when the first step of which it is said was stored."""

    kind: Literal["no_signal", "fell", "solved", "mismatch"]
    reason: str
    advice: str
    since_ns: int

    @property
    def line(self) -> str:
        return f"{self.reason}; {self.advice}"


class _Step(msgspec.Struct, kw_only=True):
    """The facts kept of one step. ``groups`` are those with equal rewards; ``mean`` is the success as of this step."""

    step: int
    time_ns: int
    episodes: int
    success: float
    reward: float
    groups: int
    replaced: int
    is_silent: bool
    difference: float
    mean: float | None = None


class LearningSignal:
    """The fold. Steps of lineages that were cut off are forgotten; a lineage that begins has shown nothing yet."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._first_step = 0
        self._silent = 0
        self._best = 0.0

    def apply(self, message: Message, time_ns: int) -> None:
        """Apply an entry of the journal; other messages are ignored."""
        match message:
            case LineageStarted():
                self._steps = [each for each in self._steps if each.step <= message.parent_step]
                self._first_step, self._silent = len(self._steps), 0
                self._best = max((each.mean for each in self._steps if each.mean is not None), default=0.0)
            case StepTrained():
                self._add_step(message, time_ns)

    @property
    def latest(self) -> SignalDiagnosis | None:
        """The diagnosis as of the newest step; None while there is something to learn from."""
        fall = self._diagnose_fall() or self._diagnose_mismatch()
        silent = self._steps[len(self._steps) - self._silent :] if self._silent else []
        groups = sum(max(each.groups, 1) for each in silent)
        if groups < MANY_GROUPS or len(silent) < FEWEST_STEPS:
            return fall
        return self._diagnose_no_signal(silent, groups, fall)

    def diagnose(self, now_ns: int, *, patience_seconds: float) -> SignalDiagnosis | None:
        """The diagnosis of `latest`, if it has held for as long."""
        found = self.latest
        return found if found is not None and now_ns - found.since_ns >= patience_seconds * 1e9 else None

    def _add_step(self, message: StepTrained, time_ns: int) -> None:
        metrics = message.metrics
        advantage, flat = metrics.get("advantage_size_mean", math.nan), metrics.get("groups_without_signal", 0.0)
        step = _Step(
            step=message.step,
            time_ns=time_ns,
            episodes=len(message.episodes),
            success=metrics.get("success", math.nan),
            reward=metrics.get("reward", math.nan),
            groups=int(flat) if math.isfinite(flat) else 0,
            replaced=sum(each.reason == "no_signal" for each in message.excluded),
            is_silent=advantage <= ZERO_ADVANTAGE,
            difference=metrics.get("logprob_difference_mean", math.nan),
        )
        self._steps.append(step)
        self._silent = self._silent + 1 if step.is_silent else 0
        step.mean = _compute_success(self._find_window())
        self._best = max(self._best, step.mean or 0.0)

    def _find_window(self) -> list[_Step]:
        """The newest steps of this lineage that hold `WINDOW_EPISODES`; none if there are not as many."""
        held = 0
        for index in range(len(self._steps) - 1, self._first_step - 1, -1):
            held += self._steps[index].episodes
            if held >= WINDOW_EPISODES and len(self._steps) - index >= FEWEST_STEPS:
                return self._steps[index:]
        return []

    def _compute_success_until(self, end: int) -> float:
        """The mean success of the steps up to number ``end`` of those that are kept, so many as hold `WINDOW_EPISODES`."""
        held, index = 0, end
        while index >= 0 and held < WINDOW_EPISODES:
            held += self._steps[index].episodes
            index -= 1
        return _compute_weighted_mean(self._steps[index + 1 : end + 1], "success")

    def _diagnose_no_signal(self, silent: list[_Step], groups: int, fall: SignalDiagnosis | None) -> SignalDiagnosis:
        recent = _select_last_groups(silent)
        success, reward = _compute_weighted_mean(recent, "success"), _compute_weighted_mean(recent, "reward")
        first = silent[0]
        measured = f"success {success:.2f}, reward {reward:.2f}"
        equal = any(each.groups for each in silent)
        what = f"the last {groups} groups had equal rewards each" if equal else "no token of its episodes counts"
        if success >= SOLVED:
            reason = f"no more to learn since step {first.step}: {what} ({measured})"
            advice = "stop the run, or use harder tasks"
            return SignalDiagnosis(kind="solved", reason=reason, advice=advice, since_ns=first.time_ns)
        replaced = sum(each.replaced for each in silent)
        filtered = f", and {replaced} episodes more were replaced for it" if replaced else ""
        reason = f"no signal since step {first.step}: {what} ({measured}){filtered}, so that every advantage is zero"
        if fall is not None:
            return SignalDiagnosis(
                kind="no_signal", reason=f"{fall.reason}, and {reason}", advice=fall.advice, since_ns=fall.since_ns
            )
        return SignalDiagnosis(kind="no_signal", reason=reason, advice=_choose_advice(success, equal), since_ns=first.time_ns)

    def _diagnose_fall(self) -> SignalDiagnosis | None:
        now = self._steps[-1].mean if self._steps else None
        if now is None or self._best < LEARNED or now > LOST_SHARE * self._best:
            return None
        downwards = range(len(self._steps) - 1, -1, -1)
        high = next((index for index in downwards if self._steps[index].success >= NEARLY_BEST * self._best), 0)
        after = [each for each in self._steps[high:] if each.success <= LOST_SHARE * self._best] or self._steps[-1:]
        low, begin = after[0], self._steps[high].step
        within = low.step - begin
        best = max(self._best, self._compute_success_until(high))
        reason = f"success fell from {best:.2f} to {now:.2f} within {within} step{'s' if within != 1 else ''} of step {begin}"
        return SignalDiagnosis(kind="fell", reason=reason, advice=FALL_ADVICE, since_ns=low.time_ns)

    def _diagnose_mismatch(self) -> SignalDiagnosis | None:
        """Of this lineage's newest `FEWEST_STEPS` steps in which it was measured; none if one of them is below the bound."""
        measured = [each for each in self._steps[self._first_step :] if math.isfinite(each.difference)][-FEWEST_STEPS:]
        if len(measured) < FEWEST_STEPS or min(each.difference for each in measured) <= MISMATCH:
            return None
        reason = (
            f"sampler and trainer disagree since step {measured[0].step}: their log-probabilities of the same tokens under the "
            f"same weights differ by {measured[-1].difference:.3f} on average (bound {MISMATCH:g})"
        )
        return SignalDiagnosis(kind="mismatch", reason=reason, advice=MISMATCH_ADVICE, since_ns=measured[0].time_ns)


MISMATCH_ADVICE = (
    "compute the head in float32 on both sides (inference.head_dtype, trainer.head_precision), and see whether the engine "
    "quantizes, or correct for it (algorithm.rollout_correction = tis)"
)

FALL_ADVICE = (
    "it will not recover by itself: start again with a lower learner.learning_rate or learner.max_grad_norm, and see what the "
    "tasks were, if they changed"
)


def _choose_advice(success: float, equal: bool) -> str:
    if not equal:
        return (
            "its episodes run out of tokens: raise episode.max_episode_tokens, "
            "or set algorithm.mask_truncated_completions = false"
        )
    if success < 0.05:
        return (
            "inspect one (`fleetbus episodes RUN`): try easier tasks, larger groups or partial rewards, and check the verifier"
        )
    return "its answers to a task are all alike: a higher episode.temperature, or tasks that it solves now and then"


def _select_last_groups(silent: list[_Step]) -> list[_Step]:
    """The newest of these steps that hold `MANY_GROUPS` groups: a streak may be long, and its beginning may differ."""
    found: list[_Step] = []
    for each in reversed(silent):
        found.append(each)
        if sum(max(step.groups, 1) for step in found) >= MANY_GROUPS:
            break
    return found


def _compute_success(steps: list[_Step]) -> float | None:
    mean = _compute_weighted_mean(steps, "success")
    return None if math.isnan(mean) else mean


def _compute_weighted_mean(steps: list[_Step], name: Literal["success", "reward"]) -> float:
    """The mean over the episodes of these steps; NaN if it was not measured."""
    episodes = sum(each.episodes for each in steps)
    values = (each.success if name == "success" else each.reward for each in steps)
    return sum(value * each.episodes for value, each in zip(values, steps, strict=True)) / episodes if episodes else math.nan
