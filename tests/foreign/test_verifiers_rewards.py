"""Rewards of the package `verifiers` through the adapter: those of the package's own evaluation on the same answers.

``just test-foreign`` makes the two interpreters; FOREIGN_EPISODES is how many answers each environment gets, by default 200 and
of `scratchpad`, whose harness starts an interpreter for each, six.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.foreign.playing import play_all, play_to_verdicts
from tests.foreign.recorded_games import V1, load_games, play_original

ROOT = Path(__file__).parents[2]
V0 = os.environ.get("VERIFIERS_V0_PYTHON", str(ROOT / ".venv-verifiers-v0/bin/python"))
EPISODES = os.environ.get("FOREIGN_EPISODES", "")
WORDS = ("alpha", "bravo", "charlie", "delta", "echo")
TOOLS = {"tool_A": {"x": 1}, "tool_B": {"x": "a"}, "tool_C": {"x": 1.5}, "tool_D": {"x": True}}
ROLES = {"kuhn_poker": ("player0", "player1"), "proposer_solver": ("proposer", "solver")}
GAMES_OF_NULL = 5
"""With the package's own harness, which starts an interpreter for each turn."""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(1800)]


def answer_scratchpad(index: int, draw: random.Random) -> list[Any]:
    said = draw.choice([WORDS[index], "nothing", f"It is {WORDS[index]}."])
    return draw.choice([[[["scratchpad_roundtrip", {"word": WORDS[index]}]], said], [said]])


def answer_tools(index: int, draw: random.Random) -> list[Any]:
    return [[[name, TOOLS[name]] for name in draw.sample(sorted(TOOLS), draw.randint(1, 4))] if draw.random() < 0.9 else "no"]


CASES: dict[str, tuple[str, str, Callable[[int, random.Random], list[Any]], int]] = {
    "scratchpad": (V1, " agent.harness.id=null", answer_scratchpad, 6),
    "tool_test": (V0, "", answer_tools, 200),
}


@pytest.mark.parametrize("name", CASES)
async def test_rewards_are_those_of_the_packages_own_evaluation(name: str) -> None:
    python, arguments, answer, count = CASES[name]
    draw = random.Random(name)
    episodes = [(index, answer(index, draw)) for index in (draw.randrange(5) for _ in range(int(EPISODES or count)))]
    paid, _ = await anyio.to_thread.run_sync(lambda: play_original(name, episodes, python=python))
    theirs = [each["agent"] if isinstance(each, dict) else each for each in paid]
    ours = await play_all(f"verifiers+python={python}:{name}{arguments}", episodes)
    print(name, len(ours), "errors", theirs.count(None), "rewards", sorted({reward for reward in ours if reward is not None}))
    assert ours == theirs
    assert len({reward for reward in ours if reward is not None}) > 1, "answers differ in what they are worth"


@pytest.mark.parametrize("name", ROLES)
async def test_recorded_games_are_paid_as_the_package_pays_them(name: str) -> None:
    games = load_games(name)
    episodes = [(game.place, game.answers) for game in games]
    rewards, taken = await anyio.to_thread.run_sync(lambda: play_original(name, episodes, "in_process"))
    assert rewards == [game.rewards for game in games]
    assert taken == [len(game.answers) for game in games]


@pytest.mark.parametrize(
    ("name", "trained", "harness"),
    [(name, trained, "in_process") for name, roles in ROLES.items() for trained in (*roles, "all")]
    + [(name, "all", "null") for name in ROLES],
)
async def test_each_role_has_the_reward_of_the_recorded_game(name: str, trained: str, harness: str) -> None:
    games = load_games(name)[: GAMES_OF_NULL if harness == "null" else None]
    harnesses = " ".join(f"{role}.harness.id={harness}" for role in ROLES[name])
    many = " n=2" if name == "proposer_solver" else ""
    spec = f"verifiers+python={V1}:{name} role={trained} {harnesses}{many}"
    verdicts = await play_to_verdicts(spec, [(game.place, game.answers) for game in games])
    print(name, trained, harness, len(games), "errors", verdicts.count(None))
    if trained == "all":
        assert [verdict and dict(verdict.seats) for verdict in verdicts] == [game.rewards for game in games]
    expected = [game.rewards and game.rewards[ROLES[name][0] if trained == "all" else trained] for game in games]
    assert [verdict and verdict.reward for verdict in verdicts] == expected
