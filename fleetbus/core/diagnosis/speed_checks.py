"""Do steps take longer than they did, since which one, and which part of them? Pure.

A step's time is that of waiting for a batch, of reading it and of training it. Where waiting grew, it is said with what of the
episodes and of their workers changed beside it.
"""

from __future__ import annotations

import math

from fleetbus.core.diagnosis.episode_checks import BASELINE_STEPS
from fleetbus.core.diagnosis.facts import RunFacts, StepFacts, mean_of
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import find_growth_onset

SLOWER = 2.0
"""Times the mean of the first steps; the very first, in which workers start, is not one of them."""

PARTS = {"seconds_wait": "waiting for episodes", "seconds_read": "reading them", "seconds_train": "training"}


def check_speed(run: RunFacts, looking: Looking) -> None:
    """The time of a step against that at the start of the run."""
    times = {step.step: sum(step.metrics.get(part, math.nan) for part in PARTS) for step in run.steps[1:]}
    first = [step for step, value in times.items() if math.isfinite(value)][:BASELINE_STEPS]
    base = mean_of(times[step] for step in first)
    ratios = {step: value / base if base > 0 else math.nan for step, value in times.items()}
    looking.measure("time of a step, times that at the start", ratios, SLOWER)
    if (onset := find_growth_onset(ratios, SLOWER)) is None:
        return
    before = [step for step in run.steps if step.step in first and step.step < onset.step]
    since = [step for step in run.steps if step.step >= onset.step]
    parts = {text: (_mean(before, part), _mean(since, part)) for part, text in PARTS.items()}
    grown = max(parts, key=lambda text: parts[text][1] - parts[text][0])
    told = [f"{text} {old:.2f} to {new:.2f} s" for text, (old, new) in parts.items()]
    if grown == PARTS["seconds_wait"]:
        told += _describe_episodes(before, since)
    looking.report("slower_steps", onset, f"most of it is {grown}: {', '.join(told)}")


def _describe_episodes(before: list[StepFacts], since: list[StepFacts]) -> list[str]:
    """The facts of episodes before and since that may be why they are waited for."""

    def workers(steps: list[StepFacts], name: str) -> float:
        return mean_of(len({getattr(episode, name) for episode in step.settled} - {""}) for step in steps)

    def each(steps: list[StepFacts], name: str) -> float:
        return mean_of(getattr(episode, name) for step in steps for episode in step.settled)

    return [
        f"environment workers {workers(before, 'worker'):.1f} to {workers(since, 'worker'):.1f} a step",
        f"inference workers {workers(before, 'replica'):.1f} to {workers(since, 'replica'):.1f}",
        f"an episode {each(before, 'seconds'):.2f} to {each(since, 'seconds'):.2f} s",
        f"its tokens {each(before, 'length'):.0f} to {each(since, 'length'):.0f}",
        f"episodes that were played and not trained {_lost(before):.0%} to {_lost(since):.0%}",
    ]


def _mean(steps: list[StepFacts], metric: str) -> float:
    return mean_of(step.metrics.get(metric, math.nan) for step in steps)


def _lost(steps: list[StepFacts]) -> float:
    return mean_of(bool(episode.reason) for step in steps for episode in step.settled)
