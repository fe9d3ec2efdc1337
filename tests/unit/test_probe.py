"""A probe finds every planted hole, those of other probes' demonstrations among them, and none in sound graders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import pytest

from fleetbus.core.probe.findings import MEANINGS, ProbeReport
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.probe.cases import Case, build_cases
from fleetbus_workers.probe.probing import Prober
from tests.support.planted_graders import CHOICES, COUNTING, HOLES, SENTENCES, SOUND, SUMS, Grade, exact, in_tag, tagged


class CalledGrader:
    """A function of this process in the place of a verifier."""

    ends = False
    is_isolated = False
    idle: Sequence[str] = ()

    def __init__(self, grade: Grade) -> None:
        self._grade = grade

    def can_grade(self, case: Case) -> bool:
        return True

    async def grade(self, case: Case, text: str | None, *, after_work: bool) -> tuple[float | None, str]:
        try:
            reward = self._grade(text or "", str(case.task.config.get("answer", "")))
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
        return (reward, "") if math.isfinite(reward) else (None, f"the verifier returned {reward!r}")

    async def grade_idle(self, case: Case, name: str) -> tuple[float | None, str]:
        raise NotImplementedError


def probe(grade: Grade, tasks: list[Task], *, repeat: int = 2) -> ProbeReport:
    prober = Prober(CalledGrader(grade), repeat=repeat, places=4, success=1.0)
    return anyio.run(prober.run, build_cases(tasks))


@pytest.mark.parametrize("name", HOLES)
def test_a_planted_hole_is_found(name: str) -> None:
    kind, what, grade, tasks = HOLES[name]
    report = probe(grade, tasks)
    found = {(each.kind, each.what): each for each in report.findings}
    assert (kind, what) in found, f"{(kind, what)} is not among {sorted(found)}"
    finding = found[kind, what]
    assert 0 < finding.count <= finding.tried
    assert finding.share.low <= finding.share.value <= finding.share.high
    assert finding.meaning == MEANINGS[finding.kind]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_grader_raises_no_alarm(name: str) -> None:
    report = probe(*SOUND[name])
    assert [f"{each.kind}: {each.what}: {each.example}" for each in report.findings] == []
    assert report.right_reward == pytest.approx(1.0)


def test_a_grader_that_reads_nothing_is_one_finding() -> None:
    report = probe(lambda said, answer: 0.7, COUNTING)
    assert [(each.kind, each.what, each.count, each.tried) for each in report.findings] == [
        ("false_accept", "anything, in place of an answer", 8, 8)
    ]


def test_counts_are_of_cases_and_both_orders_of_a_hedge_have_to_be_paid() -> None:
    report = probe(in_tag, SUMS)
    found = {each.what: each for each in report.findings}
    assert (found["one or another"].count, found["one or another"].tried) == (8, 8)
    first = probe(lambda said, answer: float(said.split(" or ")[0].strip() == answer), SUMS)
    assert "one or another" not in {each.what for each in first.findings}


def test_right_answers_go_where_they_are_paid() -> None:
    assert probe(tagged, CHOICES).slot == "<answer>"
    assert probe(exact, COUNTING).slot == "bare"


def test_a_strict_grader_is_noted_and_one_that_reads_sentences_has_to_take_other_dress() -> None:
    strict = probe(exact, COUNTING)
    assert strict.findings == ()
    assert "wants the bare answer" in strict.notes[0]
    reads = probe(lambda said, answer: float(answer in said.replace('"', "#")) if '"' not in said else 0.0, SENTENCES)
    assert ("false_reject", "quotes") in {(each.kind, each.what) for each in reads.findings}


def test_without_right_answers_what_needs_none_is_tried() -> None:
    tasks = [Task(key=f"t{n}", prompt=f"Question {n}") for n in range(4)]
    paid = probe(lambda said, answer: float(len(said) > 100), tasks)
    assert ("false_accept", "filler") in {(each.kind, each.what) for each in paid.findings}
    assert "no right answer is known" in paid.notes[0]
    guess = probe(lambda said, answer: float(said == "7"), tasks)  # one of them may be right
    assert guess.findings == ()
    any_number = probe(lambda said, answer: float(said.isdigit()), tasks)
    assert "always the same, whatever is asked" in {each.what for each in any_number.findings}


def test_no_verdict_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="no verdict on anything: ZeroDivisionError"):
        probe(lambda said, answer: 1 / 0, COUNTING)
    with pytest.raises(UserError, match="nothing to probe"):
        probe(exact, [])


def test_what_fails_on_some_cases_is_not_tried_on_all() -> None:
    calls: list[str] = []

    def hang(said: str, answer: str) -> float:
        calls.append(said)
        raise TimeoutError if said == "NaN" else ValueError

    tasks = [Task(key=f"t{n}", prompt="?", config={"answer": f"{n}"}) for n in range(20)]
    with pytest.raises(UserError):
        probe(hang, tasks)
    assert calls.count("NaN") <= 3 + 4  # those that were at it already may finish
