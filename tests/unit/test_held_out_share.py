"""The share of tasks that training never sees, and none of it: all tasks of a small game have to be played."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.config.check import check_configuration
from fleetbus.config.settings import Configuration, EvaluationSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.assembly.learner_parts import build_curriculum

DEALS = Path(__file__).parents[2] / "docs" / "examples" / "kuhn.json"


def build_configuration(held_out: float, episodes: int = 0) -> Configuration:
    return Configuration(run=RunSettings(tasks=str(DEALS)), evaluation=EvaluationSettings(episodes=episodes, held_out=held_out))


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (0.1, 1), (0.5, 3), (0.99, 5)])
def test_a_share_of_the_tasks_is_held_out_and_one_at_least_unless_it_is_0(share: float, held_out: int) -> None:
    curriculum = build_curriculum(build_configuration(share))
    trained = {curriculum.task(number).key for number in range(60)}
    assert (len(trained), len(curriculum.held_out)) == (6 - held_out, held_out)
    assert trained.isdisjoint(task.key for task in curriculum.held_out)


def test_an_evaluation_without_held_out_tasks_is_refused() -> None:
    with pytest.raises(UserError, match=r"evaluation\.held_out = 0 .* set evaluation\.episodes = 0"):
        check_configuration(build_configuration(0.0, episodes=64))
    check_configuration(build_configuration(0.0))
    check_configuration(build_configuration(0.1, episodes=64))
