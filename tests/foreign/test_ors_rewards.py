"""Rewards of servers of the Open Reward Standard through the adapter: those of the packages' own clients on the same answers.

``just test-foreign`` makes the interpreter; ORS_EPISODES is how many answers each package gets.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.ors_process import SCRIPT, ors_python, ors_server
from tests.support.tool_calls import NoGrader

EPISODES = int(os.environ.get("ORS_EPISODES", "150"))
REAL = runpy.run_path(str(SCRIPT), run_name="real")
AT_A_TIME = 4

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(600)]


def answer(index: int, draw: random.Random) -> list[Any]:
    """Calls of one episode: comparisons, mistakes, and an answer that is right, wrong, permuted, too short, or none."""
    words = REAL["draw_order"](index)
    permuted = draw.sample(words, len(words))
    submitted = draw.choice([sorted(words), permuted, permuted, ["no"] * 5, sorted(words)[:3], []])
    compared = [["compare", {"first": draw.choice(words), "second": draw.choice(words)}] for _ in range(draw.randint(0, 3))]
    mistakes = [draw.choice([["submit", {}], ["compare", {"first": 1}]])] * draw.randint(0, 1)
    return [*compared, *mistakes, *[["submit", {"words": submitted}]] * (draw.random() < 0.9)]


async def play(factory: Any, index: int, calls: list[Any]) -> tuple[list[float | None], Verdict]:
    environment, rewards = factory(), []
    try:
        await environment.open(Task(key="t", prompt="", config={"split": "train", "index": index}))
        await environment.reset()
        for turn, (name, arguments) in enumerate(calls):
            asked = (ToolCall(name=name, arguments=arguments),)
            step = await environment.step(Action(episode_id="e", attempt=1, turn=turn, text="", tool_calls=asked))
            rewards.append(None if step.tool_errors or step.unrewarded else step.reward)
        return rewards, await environment.verify()
    finally:
        await environment.close()


@pytest.mark.parametrize("package", ["ors", "openreward"])
async def test_rewards_are_those_of_the_package_s_own_client(package: str, tmp_path: Path) -> None:
    draw = random.Random(package)
    episodes = [(number % 50, answer(number % 50, draw)) for number in range(EPISODES)]
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    ours: list[Any] = [None] * len(episodes)
    with ors_server(package) as url:
        original = Path(__file__).with_name("original_ors_rewards.py")
        done = await anyio.run_process([ors_python(), original, package, url, file], stderr=subprocess.DEVNULL)
        theirs = json.loads(done.stdout.splitlines()[-1])
        factory: Any = build_environment_factory(f"ors:{url}#order", verifier=NoGrader(), configuration=Configuration())
        gate = anyio.CapacityLimiter(AT_A_TIME)

        async def play_one(number: int) -> None:
            async with gate:
                ours[number] = await play(factory, *episodes[number])

        async with factory.run(), anyio.create_task_group() as group:
            for number in range(len(episodes)):
                group.start_soon(play_one, number)
    assert [rewards for rewards, _ in ours] == theirs
    sums = [
        sum(reward for reward in rewards if reward is not None) if any(rewards) or 0.0 in rewards else None
        for rewards in theirs
    ]
    assert [verdict.reward for _, verdict in ours] == pytest.approx(sums)
    calls = sum(map(len, theirs))
    print(package, len(ours), "episodes", calls, "calls", "without a reward", sums.count(None), "sums", len(set(sums)))
    assert len(set(sums)) > 5, "answers differ in what they are worth"
