"""Rewards of the package `verifiers` through the adapter: those of the package's own evaluation on the same answers.

``just test-foreign`` makes the two interpreters; FOREIGN_EPISODES is how many answers each environment gets.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory

ROOT = Path(__file__).parents[2]
V1 = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers/bin/python"))
V0 = os.environ.get("VERIFIERS_V0_PYTHON", str(ROOT / ".venv-verifiers-v0/bin/python"))
EPISODES = int(os.environ.get("FOREIGN_EPISODES", "200"))
AT_A_TIME = 4
WORDS = ("alpha", "bravo", "charlie", "delta", "echo")
TOOLS = {"tool_A": {"x": 1}, "tool_B": {"x": "a"}, "tool_C": {"x": 1.5}, "tool_D": {"x": True}}

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(1800)]


def answer_scratchpad(index: int, draw: random.Random) -> list[Any]:
    said = draw.choice([WORDS[index], "nothing", f"It is {WORDS[index]}."])
    return draw.choice([[[["scratchpad_roundtrip", {"word": WORDS[index]}]], said], [said]])


def answer_kuhn(index: int, draw: random.Random) -> list[Any]:
    return [draw.choice(["[check]", "[bet]", "I [fold]", "[call]", "hm", "[check] or [bet]"]) for _ in range(8)]


def answer_proposer(index: int, draw: random.Random) -> list[Any]:
    contract = draw.choice(['{"problem": "2+2?", "answer": 4}', "no contract", '{"problem": "2+2?", "answer": "4"}'])
    return [contract, *(draw.choice(["4", "It is 5.", "4, or 5", ""]) for _ in range(2))]


def answer_tools(index: int, draw: random.Random) -> list[Any]:
    return [[[name, TOOLS[name]] for name in draw.sample(sorted(TOOLS), draw.randint(1, 4))] if draw.random() < 0.9 else "no"]


CASES: dict[str, tuple[str, str, Callable[[int, random.Random], list[Any]]]] = {
    "scratchpad": (V1, " agent.harness.id=null", answer_scratchpad),
    "kuhn_poker": (V1, " player0.harness.id=null player1.harness.id=null", answer_kuhn),
    "proposer_solver": (V1, " role=solver proposer.harness.id=null solver.harness.id=null n=2", answer_proposer),
    "tool_test": (V0, "", answer_tools),
}


def act(turn: int, answer: Any) -> Action:
    if isinstance(answer, str):
        return Action(episode_id="e", attempt=1, turn=turn, text=answer)
    calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in answer)
    return Action(episode_id="e", attempt=1, turn=turn, text="", tool_calls=calls)


async def play(factory: Any, index: int, answers: list[Any]) -> float | None:
    environment = factory()
    try:
        await environment.open(Task(key=f"t{index}", prompt="", config={"index": index}))
        await environment.reset()
        for turn in range(40):
            if (await environment.step(act(turn, answers[turn] if turn < len(answers) else "done"))).terminated:
                break
        verdict = await environment.verify()
        assert verdict.reward is not None
        return float(verdict.reward)
    except EnvironmentFailed:
        return None
    finally:
        await environment.close()


async def play_all(spec: str, episodes: list[tuple[int, list[Any]]]) -> list[float | None]:
    settings = Configuration(environment=EnvironmentSettings(agent_isolation="auto"), limits=LimitSettings(reset=600))
    factory: Any = build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]
    rewards: list[float | None] = [None] * len(episodes)
    gate = anyio.CapacityLimiter(AT_A_TIME)

    async def play_one(number: int) -> None:
        async with gate:
            rewards[number] = await play(factory, *episodes[number])

    async with factory.run(), anyio.create_task_group() as group:
        for number in range(len(episodes)):
            group.start_soon(play_one, number)
    return rewards


@pytest.mark.parametrize("name", CASES)
async def test_rewards_are_those_of_the_packages_own_evaluation(name: str, tmp_path: Path) -> None:
    python, arguments, answer = CASES[name]
    draw = random.Random(name)
    indexes = [draw.randrange(5) for _ in range(EPISODES)]
    episodes = [(index, answer(index, draw)) for index in indexes]
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    original = Path(__file__).with_name("original_rewards.py")
    done = await anyio.run_process([python, str(original), name, str(file)], stderr=subprocess.DEVNULL)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = await play_all(f"verifiers+python={python}:{name}{arguments}", episodes)
    print(name, len(ours), "errors", theirs.count(None), "rewards", sorted({reward for reward in ours if reward is not None}))
    assert ours == theirs
    assert len({reward for reward in ours if reward is not None}) > 1, "answers differ in what they are worth"
