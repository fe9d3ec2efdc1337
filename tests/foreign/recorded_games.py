"""Games of the package `verifiers` as its own evaluation played and paid them: 200 of each in ``games/NAME.json``.

``python -m tests.foreign.recorded_games NAME`` plays them anew; ``just test-foreign`` makes the interpreter.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("games")
ORIGINAL = Path(__file__).with_name("original_rewards.py")
V1 = os.environ.get("VERIFIERS_PYTHON", str(Path(__file__).parents[2] / ".venv-verifiers/bin/python"))
GAMES, TASKS = 200, 6


class Game(NamedTuple):
    """``place`` is the task's in the package's data. ``rewards`` by role are the mean where a role played several times, None
    where the package recorded an error."""

    place: int
    answers: list[str]
    rewards: dict[str, float] | None


def answer_kuhn(draw: random.Random) -> list[str]:
    """A plan for both kinds of turns is one legal move in each."""
    moves = [f"With this card [{first}]; after a bet [{second}]." for first in ("check", "Bet") for second in ("fold", "CALL")]
    odd = ["[bet]", "[call]", "hm", "[check] or [bet], [fold] or [call]", "[raise]", ""]
    return [draw.choice(moves if draw.random() < 0.8 else odd) for _ in range(8)]


def answer_proposer(draw: random.Random) -> list[str]:
    contracts = [
        'Two and two.\n{"problem": "2+2?", "answer": 4}',
        '{"problem": "What is \\(\\frac{8}{2}\\)?", "answer": 4}',
        '{\n  "problem": "How much is missing?",\n  "answer": -12\n}\nThat is it.',
        '{"problem": "A thousand and 234?", "answer": 1234}',
    ]
    odd = ["no contract", '{"problem": "2+2?", "answer": "4"}', '{"problem": "Is it so?", "answer": true}', '{"answer": 4}', ""]
    said = ["4", "It is 5, no: 4", "4, or 5", "-12", "= 1,234.", "It is 1234", ""]
    return [draw.choice(contracts if draw.random() < 0.9 else odd), *(draw.choice(said) for _ in range(2))]


ANSWERS: dict[str, Callable[[random.Random], list[str]]] = {"kuhn_poker": answer_kuhn, "proposer_solver": answer_proposer}


def load_games(name: str) -> list[Game]:
    return [Game(*entry) for entry in json.loads((FOLDER / f"{name}.json").read_text())]


def play_original(
    name: str, episodes: list[tuple[int, list[Any]]], *harness: str, python: str = V1
) -> tuple[list[Any], list[int]]:
    """What the package's own evaluation pays for each episode, and how many of its answers it took."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(episodes, file)
        file.flush()
        command = [python, str(ORIGINAL), name, file.name, *harness]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    rewards, taken = json.loads(done.stdout.splitlines()[-1])
    return rewards, taken


def main(name: str) -> None:
    draw = random.Random(name)
    episodes = [(draw.randrange(TASKS), ANSWERS[name](draw)) for _ in range(GAMES)]
    rewards, taken = play_original(name, episodes, "in_process")
    games = [Game(place, answers[:count], paid) for (place, answers), paid, count in zip(episodes, rewards, taken, strict=True)]
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(game, sort_keys=True) for game in games)
    (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
