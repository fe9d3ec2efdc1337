"""How the policy moves: size of updates, entropy, and a reward that does not move. Pure."""

from __future__ import annotations

import math

from fleetbus.core.diagnosis.episode_checks import BASELINE_STEPS, has_improved
from fleetbus.core.diagnosis.facts import RunFacts, mean_of
from fleetbus.core.diagnosis.intervals import Interval, find_t_quantile
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import FALSE_ALARMS, TESTS, Onset, find_growth_onset, find_onset

UPDATE = 100.0
"""Norm of the gradient, in times of the bound that it is clipped to: of the geometric mean."""

COLLAPSED = 0.1
EXPLODED = 3.0
"""Times the entropy at the start."""

HIGH_SUCCESS = 0.8
"""From here on a policy that is certain may just be right."""

FLAT_STEPS = 30
FLAT = 0.03
"""A reward that certainly moved by less than this over so many steps or more has stopped."""

AT_ITS_END = 0.9


def check_updates(run: RunFacts, looking: Looking) -> None:
    """The norm of the gradient before it is clipped, against the bound of the clip."""
    bound = run.read_setting("learner", "max_grad_norm")
    rates = run.list_metric("learning_rate")
    norms = run.list_metric("grad_norm")
    if bound is None:
        looking.measure("gradient norm", norms, math.inf)
        return
    ratios = {step: value / bound for step, value in norms.items()}
    looking.measure("gradient norm, times its clip", ratios, UPDATE)
    if (onset := find_growth_onset(ratios, UPDATE)) is not None:
        looking.report("exploding_update", onset, f"learning rate {rates[onset.step]:.2g} at step {onset.step}")


def check_entropy(run: RunFacts, looking: Looking) -> None:
    """The trainer's mean entropy per token, against the start of the run."""
    entropies = run.list_metric("entropy")
    base = mean_of([value for value in entropies.values() if math.isfinite(value)][:BASELINE_STEPS])
    ratios = {step: value / base if base else math.nan for step, value in entropies.items()}
    looking.measure("entropy, times that at the start", ratios, EXPLODED)
    text = f"{base:.3g} nats per token in the first {BASELINE_STEPS} steps"
    if (onset := find_onset(ratios, EXPLODED, tests=2)) is not None:
        looking.report("entropy_explosion", onset, text)
    onset = find_onset({step: -value for step, value in ratios.items()}, -COLLAPSED, tests=2)
    if onset is not None and not has_improved(run, onset.step) and _find_success(run, onset.step) < HIGH_SUCCESS:
        size = onset.size
        sized = Interval(value=-size.value, low=-size.high, high=-size.low)
        looking.report("entropy_collapse", Onset(step=onset.step, steps=onset.steps, size=sized), text)


def check_reward(run: RunFacts, looking: Looking) -> None:
    """The change of the mean reward over the longest stretch up to now in which it certainly is a small one."""
    rewards = run.list_metric("reward")
    looking.measure("reward", rewards, math.inf)
    known = [(step, value) for step, value in rewards.items() if math.isfinite(value)]
    for begin in range(len(known) - FLAT_STEPS + 1):
        since = [value for _, value in known[begin:]]
        change = _find_change(since, len(known))
        if -FLAT < change.low and change.high < FLAT:
            step = known[begin][0]
            if _find_success(run, step) < AT_ITS_END:
                text = f"{mean_of(since):.3f} in {len(since)} steps"
                looking.report("reward_stopped", Onset(step=step, steps=len(since), size=change), text)
            return


def _find_change(values: list[float], places: int) -> Interval:
    """Change over all of ``values`` by a line of least squares, with its confidence limits."""
    count = len(values)
    middle, mean = (count - 1) / 2, mean_of(values)
    spread = math.fsum((index - middle) ** 2 for index in range(count))
    slope = math.fsum((index - middle) * value for index, value in enumerate(values)) / spread
    rest = math.fsum((value - mean - slope * (index - middle)) ** 2 for index, value in enumerate(values))
    level = 1 - FALSE_ALARMS / (TESTS * places)
    reach = find_t_quantile(level, count - 2) * math.sqrt(rest / (count - 2) / spread)
    return Interval(value=slope * count, low=(slope - reach) * count, high=(slope + reach) * count)


def _find_success(run: RunFacts, step: int) -> float:
    return mean_of(e.is_success for each in run.steps if each.step >= step for e in each.settled if e.is_graded)
