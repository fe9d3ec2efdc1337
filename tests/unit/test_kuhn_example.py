"""The example of two seats: the rules of Kuhn poker, and what each seat sees and gets of a deal."""

from __future__ import annotations

import runpy
from pathlib import Path

import anyio
import pytest

from fleetbus.config.load import load_configuration
from fleetbus_schemas import Action, Task
from fleetbus_workers.assembly.learner_parts import build_curriculum
from fleetbus_workers.assembly.trainers import build_trainer_settings
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kuhn.py"
KUHN = runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize(
    ("deal", "moves", "won"),
    [
        ("KQ", "pp", 1),
        ("QK", "pp", -1),
        ("KJ", "bb", 2),
        ("JQ", "bp", 1),
        ("KQ", "pbp", -1),
        ("JK", "pbb", -2),
        ("KJ", "", None),
        ("KJ", "p", None),
        ("KJ", "pb", None),
    ],
)
def test_the_higher_card_wins_what_was_bet_and_who_passes_a_bet_loses_one(deal: str, moves: str, won: int | None) -> None:
    assert KUHN["settle"](deal, moves) == won


async def test_each_seat_sees_its_own_card_and_the_moves_and_gets_what_the_other_loses() -> None:
    environment = KUHN["Kuhn"]()
    await environment.open(Task(key="QJ"))
    shown = [await environment.reset()]
    for turn, text in enumerate(("no", "hmm", "yes")):  # a bet, and who is asked folds
        step = await environment.step(Action(episode_id="e", attempt=1, turn=turn, text=text))
        if step.terminated:
            break
        shown.append(step)
    assert [(each.seat, each.messages[0].content) for each in shown] == [("first", "Q -"), ("second", "J b")]
    assert (await environment.verify()).seats == {"first": 1.0, "second": -1.0}


async def test_a_deal_is_played_by_a_deployment_and_each_seat_has_its_reward() -> None:
    async with small_deployment(build_configuration()) as fleet:
        members = [fleet.environment("environment-0", make=KUHN["Kuhn"]), fleet.inference("inference-0")]
        await fleet.heard(*members)
        await fleet.request("e", task=Task(key="KJ"))
        with anyio.fail_after(50):
            result = await fleet.result("e")
    assert result.outcome == "completed", result.error
    (first, second) = result.seats
    assert (first.name, second.name, first.reward) == ("first", "second", result.reward)
    assert first.reward is not None and first.reward + (second.reward or 0.0) == 0.0


def test_its_settings_play_every_deal_and_pull_to_a_policy_that_follows() -> None:
    loaded = load_configuration(file=EXAMPLE.with_suffix(".toml"), flags={"run.tasks": str(EXAMPLE.with_suffix(".json"))})
    configuration = loaded.configuration

    curriculum = build_curriculum(configuration)
    batch = [curriculum.task(number).key for number in range(configuration.learner.groups)]
    assert sorted(batch) == sorted(KUHN["DEALS"]), "one group of each deal in every batch"
    settings = build_trainer_settings(configuration)
    settings.check()
    assert settings.needs_reference and settings.trainer.saved_model == "reference"
