"""The words of a probe: findings by kind, with counts, intervals and an example, and the report. Pure data."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus.core.diagnosis.intervals import Interval
from fleetbus.core.probe.variants import Sort

Kind = Literal["false_accept", "false_reject", "unstable", "crash", "out_of_range"]

MEANINGS: dict[Kind, str] = {
    "false_accept": "an answer that is wrong, or holds no work, is paid",
    "false_reject": "a right answer is not paid",
    "unstable": "the same answer got different rewards",
    "crash": "no verdict: the grader raised, ended, took too long or returned no finite number",
    "out_of_range": "a reward outside -1 to 1, which groups with other tasks would be swamped by",
}
"""In the order in which findings are shown."""

SHOWN_CHARS = 300


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one task as it was graded, once or more. ``rewards``: None where there was no verdict, for ``reason``.
    ``source`` is ``made`` by the probe, or ``sampled`` by a policy."""

    case: str
    name: str
    sort: Sort
    said: str | None
    rewards: tuple[float | None, ...]
    reason: str = ""
    pair: str = ""
    exclusive: bool = False
    dress: bool = False
    source: Literal["made", "sampled"] = "made"

    @property
    def reward(self) -> float | None:
        """The first verdict that there is."""
        return next((each for each in self.rewards if each is not None), None)


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a finding: what was said (cut), and what came of it."""

    task: str
    said: str | None
    rewards: tuple[float | None, ...]
    reason: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` of ``tried`` cases, as a share with an interval of 95 %. ``what`` was said in them; ``mean_reward`` over the
    cases that count."""

    kind: Kind
    what: str
    meaning: str
    count: int
    tried: int
    share: Interval
    mean_reward: float | None
    example: Example


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """``right_reward`` is what right answers earn in ``slot``, None where none is known or none earned anything: then holes for
    wrong answers and refused right ones could not be looked for. ``notes`` are no findings."""

    cases: int
    gradings: int
    slot: str
    right_reward: float | None
    is_graded_scale: bool
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def build_example(graded: Graded) -> Example:
    """The case as it is shown."""
    said = graded.said
    if said is not None and len(said) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        said = f"{said[:half]} [{len(said) - 2 * half} characters] {said[-half:]}"
    return Example(task=graded.case, said=said, rewards=graded.rewards, reason=graded.reason[:SHOWN_CHARS])
