"""`fleetbus compare`: two evaluations paired by task, with an interval over tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbus.core.diagnosis.comparison import Graded, choose_evaluation, compare, list_evaluations
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import LogBuilder, read_entries


def grade(evaluation: str, rewards: dict[str, list[float]]) -> list[Graded]:
    return [Graded(evaluation, task, reward, reward >= 1) for task, values in rewards.items() for reward in values]


def test_differences_are_paired_by_task_and_tasks_of_one_side_are_left_out() -> None:
    one = grade("end", {"a": [0.0, 1.0], "b": [0.0], "c": [1.0]})
    other = grade("end", {"a": [1.0, 1.0], "b": [1.0], "d": [0.0]})

    found = compare(one, other, names=("x@end", "y@end"))

    assert [(each.task, each.difference) for each in found.tasks] == [("a", 0.5), ("b", 1.0)]
    assert found.reward is not None and found.success is not None
    assert found.reward.value == found.success.value == 0.75 and found.reward.low < 0.75 < found.reward.high
    assert (found.only_one, found.only_other) == (1, 1)


def test_a_difference_that_every_task_has_is_certain_although_tasks_differ_far_more() -> None:
    one = {f"t{number}": [number / 10] for number in range(20)}
    other = {task: [value + 0.01 * (1 + index % 2)] for index, (task, [value]) in enumerate(one.items())}

    found = compare(grade("e", one), grade("e", other), names=("x", "y"))

    assert found.reward is not None and 0.01 < found.reward.low < found.reward.high < 0.02


def test_without_a_task_in_both_nothing_is_said() -> None:
    found = compare(grade("e", {"a": [1.0]}), grade("e", {"b": [float("nan")]}), names=("x", "y"))
    assert found.reward is found.success is None and found.tasks == ()


def test_the_newest_sampled_evaluation_is_chosen() -> None:
    names = list_evaluations(grade("start", {"a": [0.0]}) + grade("end", {"a": [0.0]}) + grade("end_greedy", {"a": [0.0]}))
    assert choose_evaluation(names) == "end"
    assert choose_evaluation(["end_greedy"]) == "end_greedy" and choose_evaluation([]) is None


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    log = LogBuilder()
    for evaluation, reward in (("start", 0.0), ("end", 1.0)):
        for task in ("a", "b"):
            log.play(f"{evaluation}-{task}", split="eval", group_id=f"l1-{evaluation}", task_key=task, reward=reward)
    log.play("failed", split="eval", group_id="l1-end", task_key="a", outcome="env_failed", reward=None)
    with create_recording(tmp_path / "run.fbrec", RecordingHeader(run="run")) as writer:
        writer.add(read_entries(log))
        writer.finish()
    return tmp_path / "run.fbrec"


def test_two_evaluations_of_one_recording(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["compare", f"{recording}@start", f"{recording}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reward"]["value"] == 1.0 and found["one"].endswith("@start") and found["other"].endswith("@end")
    assert [each["episodes"] for each in found["tasks"]] == [[1, 1], [1, 1]]

    assert run_program(["compare", f"{recording}@start", f"{recording}@end"]) == 0
    assert "  reward   +1.000" in capsys.readouterr().out


def test_an_evaluation_that_is_not_there_is_named_with_those_that_are(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["compare", f"{recording}@step7", str(recording)]) == 2
    assert "has no graded evaluation step7; it has start, end" in capsys.readouterr().err
