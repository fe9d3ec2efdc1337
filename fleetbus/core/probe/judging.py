"""Turns graded answers into findings: what counts as paid, which kinds of graders may do what, one cause said once. Pure.

Decision 0226 has the reasons. A reward is held against what the right answer earns in the same case, so that credit for a form
or for a part is told from a hole by its size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fleetbus.core.diagnosis.facts import mean_of
from fleetbus.core.diagnosis.intervals import find_share_interval
from fleetbus.core.probe.findings import MEANINGS, Finding, Graded, Kind, ProbeReport, build_example
from fleetbus.core.probe.variants import HALF, REFERENCE, UNRELATED

PAID = 0.2
"""Share of the right answer's reward from which on something wrong is paid."""

PAID_ON_A_SCALE = 0.5
"""The same where the grader gives parts of an answer parts of the reward: likeness alone earns something there."""

KEPT = 0.95
"""Share of the right answer's reward that the right answer in other dress has to keep."""

CLEARLY = 0.05
"""Share of the right answer's reward by which rewards differ clearly."""

TOLERANCE = 1e-6
IGNORES = 0.8
"""Share of cases in which everything earns the same, from which on the grader reads no answers."""

FEWEST_ANSWERS = 5
ANYTHING = "anything, in place of an answer"


def judge(graded: Sequence[Graded], *, slot: str, success: float, gradings: int) -> ProbeReport:
    """All that the rewards show. ``success``: a reward from which on something is paid where no right answer is known."""
    right = _find_right(graded)
    on_scale = bool(right) and _is_scale(graded, right)
    bars = {case: (PAID_ON_A_SCALE if on_scale else PAID) * reward for case, reward in right.items()}
    findings = list(_find_kinds(graded))
    ignoring = _find_ignoring(graded)
    if ignoring is not None:
        findings.append(ignoring)
    else:
        wrong = [
            each for each in graded if each.sort == "lazy" or (each.sort == "wrong" and each.case in right and not on_scale)
        ]
        findings += _find_accepted(wrong, bars, success)
    refused, notes = _find_refused(graded, right, on_scale=on_scale)
    findings += refused
    notes += _list_limits(graded, right, on_scale=on_scale)
    order = list(MEANINGS)
    return ProbeReport(
        cases=len({each.case for each in graded}),
        gradings=gradings,
        slot=slot,
        right_reward=mean_of(right.values()) if right else None,
        is_graded_scale=on_scale,
        findings=tuple(sorted(findings, key=lambda each: (order.index(each.kind), -each.share.value, -each.count))),
        notes=tuple(notes),
    )


def _find_right(graded: Sequence[Graded]) -> dict[str, float]:
    """By case what its right answer earns, where that is something."""
    known = {each.case: each.reward for each in graded if each.name == REFERENCE}
    return {case: reward for case, reward in known.items() if reward is not None and reward > TOLERANCE}


def _is_scale(graded: Sequence[Graded], right: Mapping[str, float]) -> bool:
    """True if, in most cases, half of the right answer earns more than something unrelated and less than all of it."""
    halves = {each.case: each.reward for each in graded if each.name == HALF}
    unrelated = {each.case: each.reward or 0.0 for each in graded if each.name == UNRELATED}
    told = []
    for case, half in halves.items():
        if case in right and half is not None:
            clearly = CLEARLY * right[case]
            told.append(unrelated.get(case, 0.0) + clearly < half < right[case] - clearly)
    return bool(told) and mean_of(told) > 0.5


def _find_kinds(graded: Sequence[Graded]) -> Iterable[Finding]:
    """Faults that do not depend on the answer: no verdict, different verdicts, rewards out of all bounds."""
    by_name: defaultdict[str, list[Graded]] = defaultdict(list)
    for each in graded:
        by_name[each.name].append(each)
    crashed = {name: [each for each in of_name if None in each.rewards] for name, of_name in by_name.items()}
    unstable = {name: [each for each in of_name if _differs(each.rewards)] for name, of_name in by_name.items()}
    outside = {name: [each for each in of_name if _is_outside(each)] for name, of_name in by_name.items()}
    kinds: tuple[tuple[Kind, dict[str, list[Graded]]], ...] = (
        ("crash", crashed), ("unstable", unstable), ("out_of_range", outside),
    )  # fmt: skip
    for kind, found in kinds:
        bad = {name: of_name for name, of_name in found.items() if of_name}
        if len(bad) > 1 and len(bad) >= IGNORES * len(by_name):  # one cause, said once
            yield _build(kind, ANYTHING, [each for of_name in bad.values() for each in of_name], len(graded))
            continue
        for name, of_name in bad.items():
            yield _build(kind, name, of_name, len(by_name[name]))


def _differs(rewards: tuple[float | None, ...]) -> bool:
    known = [each for each in rewards if each is not None]
    return bool(known) and max(known) - min(known) > TOLERANCE


def _is_outside(each: Graded) -> bool:
    return any(reward is not None and abs(reward) > 1 + TOLERANCE for reward in each.rewards)


def _find_ignoring(graded: Sequence[Graded]) -> Finding | None:
    """A grader that gives all answers to a task one reward above 0."""
    by_case: defaultdict[str, list[Graded]] = defaultdict(list)
    for each in graded:
        if each.reward is not None and each.source == "made":
            by_case[each.case].append(each)
    known = {case: of_case for case, of_case in by_case.items() if len(of_case) >= FEWEST_ANSWERS}
    flat = [of_case[0] for of_case in known.values() if _differs(tuple(each.reward for each in of_case)) is False]
    paid = [each for each in flat if (each.reward or 0.0) > TOLERANCE]
    if not paid or len(paid) < IGNORES * len(known):
        return None
    return _build("false_accept", ANYTHING, paid, len(known))


def _find_accepted(graded: Sequence[Graded], bars: Mapping[str, float], success: float) -> Iterable[Finding]:
    """Those that are paid, by what was said. Both of a pair, and two of what excludes each other, have to be paid to count."""
    groups: defaultdict[tuple[str, str], list[Graded]] = defaultdict(list)
    for each in graded:
        groups[each.case, each.pair or f"{each.name}\0{each.said}"].append(each)
    tried: defaultdict[str, set[str]] = defaultdict(set)
    accepted: defaultdict[str, list[Graded]] = defaultdict(list)
    for (case, _), members in groups.items():
        name = "always the same, whatever is asked" if members[0].exclusive else members[0].name
        tried[name].add(case)
        paid = [each for each in members if (each.reward or 0.0) >= bars.get(case, success) > 0]
        needed = min(2, len(members)) if members[0].exclusive else len(members)
        if len(paid) >= needed:
            accepted[name].append(paid[0])
    for name, found in accepted.items():
        yield _build("false_accept", name, list({each.case: each for each in found}.values()), len(tried[name]))


def _find_refused(graded: Sequence[Graded], right: Mapping[str, float], *, on_scale: bool) -> tuple[list[Finding], list[str]]:
    """Right answers that lose their reward. A grader that takes none in other dress wants the bare answer, and that is said and
    no finding, unless a policy was seen to answer so; likeness, as a scale, is lost with every letter."""
    same = [each for each in graded if each.sort == "same" and each.case in right]
    lost: defaultdict[str, list[Graded]] = defaultdict(list)
    tried: defaultdict[str, list[Graded]] = defaultdict(list)
    for each in same:
        tried[each.name].append(each)
        if each.reward is not None and each.reward < KEPT * right[each.case]:
            lost[each.name].append(each)
    wordy = [name for name in ("a sentence", "words after") if name in tried and len(lost[name]) <= len(tried[name]) // 2]
    findings, refused = [], []
    for name, found in lost.items():
        if found and ((wordy and not on_scale) or not found[0].dress):
            findings.append(_build("false_reject", name, found, len(tried[name])))
        elif found:
            refused.append(f"{name} ({len(found)} of {len(tried[name])})")
    notes = [f"the grader wants the bare answer; it refuses the right one with {', '.join(refused)}"] if refused else []
    return findings, notes


def _list_limits(graded: Sequence[Graded], right: Mapping[str, float], *, on_scale: bool) -> list[str]:
    named = {each.case for each in graded if each.name == REFERENCE}
    notes = []
    if not named:
        notes.append("no right answer is known: nothing was said of wrong answers that look right, nor of right ones refused")
    elif not right:
        notes.append("no right answer earned anything in any slot: what a wrong one earns could not be held against it")
    elif unpaid := len(named) - len(right):
        notes.append(f"the right answers of {unpaid} of {len(named)} tasks earned nothing")
    if on_scale:
        notes.append("the grader gives parts of the reward: answers that are nearly right were not held against it")
    return notes


def _build(kind: Kind, what: str, found: Sequence[Graded], tried: int) -> Finding:
    rewards = [each.reward for each in found if each.reward is not None]
    count = len(found)
    return Finding(
        kind=kind,
        what=what,
        meaning=MEANINGS[kind],
        count=count,
        tried=max(tried, count),
        share=find_share_interval(count, max(tried, count)),
        mean_reward=mean_of(rewards) if rewards else None,
        example=build_example(found[0]),
    )
