"""The example of two policies: what is proposed, what solves it, and who is worth what."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from fleetbus_schemas import Action, Task

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "proposer.py"
PROPOSER = runpy.run_path(str(EXAMPLE))


def act(text: str) -> Action:
    return Action(episode_id="e", attempt=1, turn=1, text=text)


@pytest.mark.parametrize(
    ("proposed", "vowels", "answered", "proposer", "solver"),
    [
        ("bcd", 0, "bcd", 0.0, 1.0),
        ("one", 2, "bcd", 0.0, 0.0),
        ("one", 2, "One", 0.5, 1.0),
        ("aeiouaeiou", 10, "aeio", 1.0, 1.0),
        ("aeio", 4, "aei", 0.0, 0.0),
    ],
)
def test_the_proposer_is_worth_more_the_harder_a_problem_that_is_solved(
    proposed: str, vowels: int, answered: str, proposer: float, solver: float
) -> None:
    game = PROPOSER["Spelling"]()
    game.open(Task(key="t", prompt="Say something."))
    assert game.reset().seat == "proposer"
    assert game.verify().reward is None
    posed = game.step(act(proposed))
    assert posed.seat == "solver" and posed.messages[0].content == f"Say something with {min(vowels, 4)} vowels."
    assert game.step(act(answered)).terminated
    verdict = game.verify()
    assert (verdict.seats, verdict.reward) == ({"proposer": proposer, "solver": solver}, solver)


def test_its_tasks_are_what_the_command_in_it_names() -> None:
    tasks = json.loads(EXAMPLE.with_suffix(".json").read_text())
    assert len({task["key"] for task in tasks}) == len(tasks) >= 8
    assert "--seat solver=train" in EXAMPLE.read_text()
