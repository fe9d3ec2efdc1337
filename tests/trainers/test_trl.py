"""TRL's `AsyncGRPOTrainer` as the trainer of a run of real processes, which are killed: `just test-trl`.

TRL says itself which episodes its steps trained (train_with_trl.py); the run's log says it, too.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("trl")

from tests.support.trl_deployment import GROUP_SIZE, GROUPS, Deployment, deployed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


def list_surviving(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that no later process began before: what TRL's last checkpoint is made of."""
    return [
        line for place, line in enumerate(lines) if all(later["began"] >= line["step"] for later in find_later(lines, place))
    ]


def find_later(lines: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    return [later for later in lines[place:] if later["process"] != lines[place]["process"]]


async def check_each_trained_once(deployment: Deployment) -> dict[str, Any]:
    """TRL trained each episode in one step of its surviving history, and the log says the same; returns the audit's books."""
    surviving = list_surviving(deployment.read_trained())
    assert [line["step"] for line in surviving] == list(range(1, len(surviving) + 1))
    trained = [episode for line in surviving for episode in line["episodes"]]
    assert len(trained) == len({*trained})
    audit = json.loads(await deployment.call("audit", "trl", "--deep", "--json"))
    assert audit["balanced"], audit
    assert audit["books"]["trained"] == len(trained)
    books: dict[str, Any] = audit["books"]
    return books


async def test_trl_trains_a_run_to_its_end_and_each_episode_once(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="4") as deployment:
        await deployment.wait_for_end(deployment.train())
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 4 * GROUPS * GROUP_SIZE
        assert (tmp_path / "run/trl/model/model.safetensors").exists()


async def test_two_processes_train_each_episode_once_and_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="2", LEARNER_CHECKPOINT_EVERY="1") as deployment:
        await deployment.wait_for_end(deployment.train(processes=2))
        deployment.change(LEARNER_STEPS="4")
        await deployment.wait_for_end(deployment.train(processes=2))
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 4 * GROUPS * GROUP_SIZE
        assert {line["began"] for line in deployment.read_trained()} == {0, 2}


async def test_killed_in_the_middle_trl_goes_on_from_its_checkpoint_and_no_task_is_asked_for_twice(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="6", LEARNER_CHECKPOINT_EVERY="2") as deployment:
        first = deployment.train()
        await deployment.wait_for_step(4, first)
        first.kill()
        await deployment.wait_for_end(deployment.train())
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 6 * GROUPS * GROUP_SIZE
        assert {line["began"] for line in deployment.read_trained()} in ({0, 2}, {0, 4})


@pytest.mark.slow
async def test_thirty_steps_of_trl_under_kills_of_all_roles_and_of_itself(tmp_path: Path) -> None:
    """A role every ten seconds in turn, TRL itself three times."""
    kills = {"roles": 0, "trl": 0}
    async with deployed(tmp_path, LEARNER_STEPS="30", LEARNER_CHECKPOINT_EVERY="3") as deployment:

        async def kill_roles() -> None:
            for index in itertools.cycle(range(4)):
                await anyio.sleep(10)
                deployment.replace(index)
                kills["roles"] += 1

        async with anyio.create_task_group() as group:
            group.start_soon(kill_roles)
            for step in (7, 15, 23):
                trainer = deployment.train()
                await deployment.wait_for_step(step, trainer)
                trainer.kill()
                kills["trl"] += 1
            await deployment.wait_for_end(deployment.train())
            group.cancel_scope.cancel()
        books = await check_each_trained_once(deployment)
    print(kills, books)
    assert books["requested"] == books["trained"] + sum(books["excluded"].values())
