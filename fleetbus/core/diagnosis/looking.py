"""Turns a quantity by step into a number with its interval, and into the onset if there is one: checks write into it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fleetbus.core.diagnosis.findings import Finding, Measure, make_finding
from fleetbus.core.diagnosis.intervals import Interval, find_mean_interval
from fleetbus.core.diagnosis.onset import Onset, find_onset

NEWEST_STEPS = 10
"""Steps that a number is the mean of."""


class Looking:
    """Gathers findings, measures, and what could not be measured."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.measures: list[Measure] = []
        self.unmeasured: list[str] = []

    def measure(self, name: str, values: Mapping[int, float], bound: float) -> None:
        """Note the mean of the newest values; none of them is finite: that it is not known."""
        known = [value for value in values.values() if math.isfinite(value)][-NEWEST_STEPS:]
        if not known:
            self.unmeasured.append(name)
            return
        self.add(name, find_mean_interval(known), len(known), bound)

    def add(self, name: str, size: Interval, steps: int, bound: float) -> None:
        """Note a number whose interval is known."""
        self.measures.append(Measure(name=name, size=size, steps=steps, bound=bound))

    def watch(self, name: str, values: Mapping[int, float], bound: float, *, tests: int = 1) -> Onset | None:
        """`measure` it, and find since when it has been above ``bound``."""
        self.measure(name, values, bound)
        return find_onset(values, bound, tests=tests)

    def report(self, kind: str, onset: Onset, evidence: str, *, subject: str = "") -> None:
        """Add a finding of that kind."""
        self.findings.append(make_finding(kind, step=onset.step, size=onset.size, evidence=evidence, subject=subject))
