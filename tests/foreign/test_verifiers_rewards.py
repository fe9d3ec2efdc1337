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

from tests.foreign.playing import play_all, play_to_verdicts

ROOT = Path(__file__).parents[2]
V1 = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers/bin/python"))
V0 = os.environ.get("VERIFIERS_V0_PYTHON", str(ROOT / ".venv-verifiers-v0/bin/python"))
EPISODES = int(os.environ.get("FOREIGN_EPISODES", "200"))
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


@pytest.mark.parametrize("name", ["kuhn_poker", "proposer_solver"])
async def test_each_of_several_trained_roles_has_the_packages_own_reward(name: str, tmp_path: Path) -> None:
    python, arguments, answer = CASES[name]
    draw = random.Random(name)
    episodes = [(index, answer(index, draw)) for index in (draw.randrange(5) for _ in range(EPISODES))]
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    original = Path(__file__).with_name("original_rewards.py")
    done = await anyio.run_process([python, str(original), name, str(file), "all"], stderr=subprocess.DEVNULL)
    theirs = json.loads(done.stdout.splitlines()[-1])
    verdicts = await play_to_verdicts(
        f"verifiers+python={python}:{name} role=all{arguments.replace(' role=solver', '')}", episodes
    )
    ours = [None if verdict is None else dict(verdict.seats) for verdict in verdicts]
    print(name, len(ours), "errors", theirs.count(None), "seats", sorted({str(seats) for seats in ours})[:9])
    assert ours == theirs
