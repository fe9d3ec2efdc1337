"""The onset of reward hacking: rewarded episodes suddenly share a phrase that was rare before, whatever their task. Pure."""

from __future__ import annotations

import math

from fleetbus.core.diagnosis.facts import PhraseShare, RunFacts, mean_of
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import Onset, find_onset

COMMON = 0.3
"""Share of rewarded episodes."""

PAYS = 0.1
"""Reward by which episodes with the phrase are above those without it."""

FEWEST_TASKS = 3
"""Tasks in which the phrase was said in the newest step: it is not the answer to one of them."""

MIXED = 0.95
"""Share of all episodes up to which those without the phrase are enough to be compared with."""


def check_phrases(run: RunFacts, looking: Looking) -> None:
    """The phrase that most rewarded episodes of the newest steps share, if it was rare in the first steps and is paid."""
    steps = {each.step: each.phrases for each in run.steps}
    largest = {
        step: max((share.rewarded for share in each.shares.values()), default=0.0) if each.measured else math.nan
        for step, each in steps.items()
    }
    looking.measure("rewarded episodes with a phrase that is new, share", largest, COMMON)
    newest = next((each for each in reversed(steps.values()) if each.measured), None)
    if newest is None:
        return
    candidates = [phrase for phrase, share in newest.shares.items() if share.rewarded > COMMON and share.tasks >= FEWEST_TASKS]
    found: list[tuple[Onset, str, float]] = []
    for phrase in candidates:
        shares = {step: each.shares.get(phrase) for step, each in steps.items() if each.measured}
        onset = find_onset(
            {step: each.rewarded if each else 0.0 for step, each in shares.items()}, COMMON, tests=len(candidates)
        )
        if onset is not None and (more := _find_advantage(run, shares, onset)) > PAYS:
            found.append((onset, phrase, more))
    if found:
        onset, phrase, more = min(found, key=lambda each: (-each[0].size.value, each[0].step, each[1]))
        tasks = newest.shares[phrase].tasks
        text = f"{phrase!r} in {tasks} tasks of the newest step; reward with it {more:.2f} above that without"
        looking.report("sudden_phrase", onset, text)


def _find_advantage(run: RunFacts, shares: dict[int, PhraseShare | None], onset: Onset) -> float:
    """Mean reward of episodes with the phrase, since the onset, less that of those without it: of the same steps as long as
    there are some, else of the steps before."""
    since = [each for step, each in shares.items() if each is not None and step >= onset.step]
    mixed = [each for each in since if each.all < MIXED and math.isfinite(each.other_reward)]
    if len(mixed) > 1:
        return mean_of(each.reward - each.other_reward for each in mixed)
    rewards = [each.reward for step in run.steps if step.step < onset.step for each in step.trained if each.reward is not None]
    return mean_of(each.reward for each in since) - mean_of(rewards)
