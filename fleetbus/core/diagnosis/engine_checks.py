"""Is what is trained what was sampled? Lag, engine mismatch, old weights, sampling settings. Pure.

Mismatch is the mean size of the difference between sampler's and trainer's log-probability over tokens that were sampled by the
very weights that the trainer has before its step, so that lag is no part of it; lag is counted in versions.
"""

from __future__ import annotations

import math

from fleetbus.core.diagnosis.facts import RunFacts, mean_of
from fleetbus.core.diagnosis.intervals import Interval
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import Onset, find_growth_onset, find_onset

MISMATCH = 1e-4
ROUNDED_MISMATCH = 0.05
"""Nats per token, of a trainer in float32 and of one in bfloat16. In float32 on both sides it is 1e-7; where one rounds it is
5e-4 to 0.03, by how certain the policy is."""

GROWTH = 2.0
"""A mismatch that begins after the first measured step and is later so many times what it was at first: weights drift apart."""

SLOPE = 0.1
"""Of the sampler's log-probabilities over the trainer's: further from 1 it is no noise, but another temperature."""

SURPRISE = 0.25
"""The share by which -log p of what was sampled is off the entropy that it is the expectation of."""

SURPRISE_FLOOR = 0.02
"""Nats that are added to an entropy before something is divided by it."""

LAG_SLACK = 0.1
"""Versions beyond the settings' bound."""


def check_engine(run: RunFacts, looking: Looking) -> None:
    """Mismatch in all its shapes, and the sampling settings."""
    _check_settings(run, looking)
    differences = run.list_metric("logprob_difference_mean")
    bound = find_mismatch_bound(run)
    looking.measure("engine mismatch, nats per token", differences, bound)
    onset = find_growth_onset(differences, bound)
    kind = _name_mismatch(run, differences, onset) if onset is not None else ""
    if onset is not None:
        looking.report(kind, onset, _describe_mismatch(run, differences, onset))
    surprises = _list_surprises(run)
    signed = (surprises, {step: -value for step, value in surprises.items()})
    looking.measure("surprise beyond entropy, share of it", surprises, SURPRISE)
    found = [each for each in (find_onset(values, SURPRISE, tests=2) for values in signed) if each is not None]
    if found and kind not in ("old_weights", "wrong_temperature"):
        gap = mean_of(value for step, value in surprises.items() if step >= found[0].step and math.isfinite(value))
        which = "less" if gap < 0 else "more"
        text = f"what was sampled is {abs(gap):.0%} {which} surprising than the trainer's entropy of the same distribution"
        looking.report("wrong_temperature", found[0], text)


def find_mismatch_bound(run: RunFacts) -> float:
    """The mismatch that is worth a word, by the trainer's precision."""
    return ROUNDED_MISMATCH if run.settings.get("trainer", {}).get("precision") == "bfloat16" else MISMATCH


def check_lag(run: RunFacts, looking: Looking) -> None:
    """Age of what is trained, in versions, against the bound that the settings name."""
    bound = run.read_setting("learner", "max_staleness")
    lags = run.list_metric("staleness_mean")
    if bound is None:
        looking.measure("lag, versions", lags, math.inf)
        return
    onset = looking.watch("lag, versions", lags, bound + LAG_SLACK)
    if onset is not None:
        flight, queue = (
            mean_of(value for step, value in run.list_metric(name).items() if step >= onset.step and math.isfinite(value))
            for name in ("staleness_in_flight_mean", "staleness_in_queue_mean")
        )
        text = f"learner.max_staleness is {bound:g}; {flight:.1f} of these passed in flight and {queue:.1f} in the queue"
        looking.report("lag", onset, text)


def _check_settings(run: RunFacts, looking: Looking) -> None:
    """Requests name their settings: one with others than the run's is no matter of statistics."""
    shares = run.list_shares(lambda each: each.is_off_settings)
    looking.measure("requested with other sampling settings, share", shares, 0.0)
    bad = [step for step, share in shares.items() if share > 0]
    if bad:
        size = mean_of(share for step, share in shares.items() if step >= bad[0] and math.isfinite(share))
        onset = Onset(step=bad[0], steps=len(bad), size=Interval(value=size, low=size, high=size))
        temperature = run.read_setting("episode", "temperature")
        looking.report("sampling_settings", onset, f"training is computed at temperature {temperature:g} without truncation")


def _name_mismatch(run: RunFacts, differences: dict[int, float], onset: Onset) -> str:
    known = [(step, value) for step, value in differences.items() if math.isfinite(value)]
    since = [value for step, value in known if step >= onset.step]
    few = max(1, len(since) // 4)
    if known[0][0] < onset.step and mean_of(since[-few:]) > GROWTH * mean_of(since[:few]):
        return "old_weights"
    slopes = [value for step, value in run.list_metric("logprob_slope").items() if step >= onset.step and math.isfinite(value)]
    return "wrong_temperature" if slopes and abs(mean_of(slopes) - 1) > SLOPE else "engine_mismatch"


def _describe_mismatch(run: RunFacts, differences: dict[int, float], onset: Onset) -> str:
    known = [(step, value) for step, value in differences.items() if math.isfinite(value)]
    before = mean_of(value for step, value in known if step < onset.step)
    since = [value for step, value in known if step >= onset.step]
    text = f"{since[0]:.2g} at step {onset.step}, {since[-1]:.2g} at step {known[-1][0]}"
    slopes = [value for step, value in run.list_metric("logprob_slope").items() if step >= onset.step and math.isfinite(value)]
    text += f"; slope of the sampler's over the trainer's {mean_of(slopes):.2f}" if slopes else ""
    return text + (f"; {before:.1g} before" if math.isfinite(before) else "")


def _list_surprises(run: RunFacts) -> dict[int, float]:
    """By step (mean -log p of trained tokens less the trainer's entropy) over the entropy: 0 in expectation if tokens come from
    the distribution that their log-probabilities are of."""
    found = {}
    for step in run.steps:
        sampled = sum(each.sampled for each in step.trained)
        entropy = step.metrics.get("entropy", math.nan)
        surprise = sum(each.surprise for each in step.trained) / sampled if sampled else math.nan
        found[step.step] = (surprise - entropy) / (entropy + SURPRISE_FLOOR)
    return found
