"""Checks of how the policy moves: size of updates, entropy, and a reward that does not move. Pure."""

from __future__ import annotations

import math

from fleetbus.core.diagnosis.episode_checks import BASELINE_STEPS, has_improved
from fleetbus.core.diagnosis.facts import RunFacts, mean_of
from fleetbus.core.diagnosis.intervals import Interval, find_t_quantile
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import FALSE_ALARMS, TESTS, Onset, find_growth_onset, find_onset

GRADIENT = 100.0
"""Norm of the gradient, in times of the bound that it is clipped to."""

RATE = 3.0
"""Learning rate, in times of the settings' peak."""

UPDATE = 0.1
"""Nats per token (k3) between the sampler and a trainer that is some versions ahead, at the step at which entropy exploded."""

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
    """The learning rate and the norm of the gradient before it is clipped, each against the settings' bound."""
    for name, setting, bound, text in (
        ("learning_rate", "learning_rate", RATE, "learning rate"),
        ("grad_norm", "max_grad_norm", GRADIENT, "gradient norm"),
    ):
        limit = run.read_setting("learner", setting) or math.nan
        ratios = {step: value / limit for step, value in run.list_metric(name).items()}
        looking.measure(f"{text}, times learner.{setting}", ratios, bound)
        if (onset := find_growth_onset(ratios, bound, tests=2)) is not None:
            value = ratios[onset.step] * limit
            text = f"{text} {value:.2g} at step {onset.step}, learner.{setting} = {limit:g}"
            looking.report("exploding_update", onset, text)


def check_entropy(run: RunFacts, looking: Looking) -> None:
    """The trainer's mean entropy per token, against the start of the run."""
    entropies = run.list_metric("entropy")
    first = [value for value in entropies.values() if math.isfinite(value)][:BASELINE_STEPS]
    base = mean_of(first)
    ratios = {step: value / base if base else math.nan for step, value in entropies.items()}
    looking.measure("entropy, times that at the start", ratios, EXPLODED)
    _check_explosion(run, looking, {step: value / min(first) for step, value in entropies.items() if first and min(first) > 0})
    onset = find_onset({step: -value for step, value in ratios.items()}, -COLLAPSED, tests=2)
    if onset is not None and not has_improved(run, onset.step) and _find_success(run, onset.step) < HIGH_SUCCESS:
        size = onset.size
        sized = Interval(value=-size.value, low=-size.high, high=-size.low)
        text = f"{base:.3g} nats per token in the first {BASELINE_STEPS} steps"
        looking.report("entropy_collapse", Onset(step=onset.step, steps=onset.steps, size=sized), text)


def _check_explosion(run: RunFacts, looking: Looking, ratios: dict[int, float]) -> None:
    """An entropy that has risen: by an update that was too large, if the sampler was that far behind the trainer then."""
    onset = find_growth_onset(ratios, EXPLODED, tests=2)
    if onset is None:
        return
    near = {s: v for s, v in run.list_metric("kl").items() if abs(s - onset.step) <= 1 and math.isfinite(v)}
    step = max(near, key=near.__getitem__, default=onset.step)
    text = f"entropy {ratios[onset.step]:.2g} times that of the start at step {onset.step}"
    looking.report("entropy_explosion", onset, text)
    if near and near[step] > UPDATE and all(each.kind != "exploding_update" for each in looking.findings):
        size = near[step] / UPDATE
        found = Onset(step=step, steps=1, size=Interval(value=size, low=size, high=size))
        looking.report("exploding_update", found, f"{near[step]:.2g} nats per token between sampler and trainer, and {text}")


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
