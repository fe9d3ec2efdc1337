"""Scores of `inspect_ai` through the adapter: those of `inspect eval` on the same answers, for tasks whose data is local."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from fleetbus_workers.environment.adapters.foreign import tasks as foreign_tasks
from tests.foreign import playing
from tests.foreign.playing import play_all
from tests.groups import lacks_docker

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("INSPECT_PYTHON", str(ROOT / ".venv-inspect/bin/python"))
EPISODES = os.environ.get("FOREIGN_EPISODES", "")
SMALL = Path(__file__).parent / "inspect_tasks" / "small.py"

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(3600)]


class Case(NamedTuple):
    """``answer`` makes the answers of an episode; ``pad`` is every further one. ``part``: the one of several of its score.
    ``in_docker``: its sandbox is a container of an image that is pulled. ``episodes``: how many, without FOREIGN_EPISODES."""

    task: str
    answer: Callable[[int, random.Random], list[Any]]
    pad: Any = "done"
    part: str = ""
    in_docker: bool = False
    episodes: int = 40


def answer_sums(index: int, draw: random.Random) -> list[Any]:
    return [draw.choice([str(index // 4 + index % 4), "7", "I do not know", f"It is {index // 4 + index % 4}."])]


def answer_with_tool(index: int, draw: random.Random) -> list[Any]:
    left, right = index // 4, index % 4
    said = draw.choice([left + right, left + right, 99])
    use: list[Any] = draw.choice([[], [[["add", {"left": left, "right": right}]]], [[["add", {"left": "x"}]]], ["Hm."]])
    return [*use, [["submit", {"answer": str(said)}]]]


def answer_dojo(index: int, draw: random.Random) -> list[Any]:
    read = [["read_file", {"file_path": "bill-december-2023.txt"}]]
    pay = {
        "recipient": draw.choice(["UK12345678901234567890", "X"]),
        "amount": 98.7,
        "subject": "Car Rental",
        "date": "2022-01-01",
    }
    return draw.choice([["done"], [read, "done"], [read, [["send_money", pay]], "done"], [[["send_money", pay]], "done"]])


def answer_guard(index: int, draw: random.Random) -> list[Any]:
    code = draw.choice(["print(0)", "print(1)", "nonsense("])
    return ["the decomposition", f"```python\n{code}\n```"]


def answer_airline(index: int, draw: random.Random) -> list[Any]:
    look = [["get_user_details", {"user_id": draw.choice(["mia_li_3668", "nobody"])}]]
    cancel = [["cancel_reservation", {"reservation_id": draw.choice(["EHGLP3", "8JX2WO"])}]]
    return draw.choice([["Hi!"], ["Hi!", look, "Sorry."], ["Hi!", look, cancel, "Done."], ["Hi!", cancel, "Done."]])


CASES = {
    "sums": Case(f"{SMALL}@sums", answer_sums),
    "sums_with_a_tool": Case(f"{SMALL}@sums_with_a_tool", answer_with_tool, [["submit", {"answer": "none"}]]),
    "agentdojo": Case("inspect_evals/agentdojo", answer_dojo, part="utility"),
    "mind2web_sc": Case("inspect_evals/mind2web_sc", answer_guard, in_docker=True),
    "tau2_airline": Case("inspect_evals/tau2_airline", answer_airline, "###STOP###", episodes=10),  # seconds of a core each
}


@pytest.mark.parametrize("name", CASES)
async def test_scores_are_those_of_the_packages_own_evaluation(name: str, tmp_path: Path) -> None:
    case, draw = CASES[name], random.Random(name)
    if case.in_docker and lacks_docker():
        pytest.skip(lacks_docker())
    indexes = [draw.randrange(10) for _ in range(int(EPISODES or case.episodes))]
    episodes = [(index, case.answer(index, draw)) for index in indexes]
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    original = str(Path(__file__).with_name("original_scores.py"))
    command = [PYTHON, original, case.task, str(file), json.dumps(case.pad), case.part]
    done = await anyio.run_process(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = await play_all(
        f"inspect+python={PYTHON}:{case.task}{f' part={case.part}' if case.part else ''}", episodes, pad=case.pad
    )
    print(name, len(ours), "errors", theirs.count(None), "scores", sorted({score for score in ours if score is not None}))
    assert ours == theirs


async def test_a_task_of_data_that_is_shuffled_is_the_one_that_was_listed() -> None:
    task = f"{SMALL}@sums shuffle=true"
    listed = foreign_tasks.list_tasks(f"inspect:{task}", PYTHON, 6).tasks
    sums = [sum(map(int, re.findall(r"\d+", each["prompt"]))) for each in listed]
    assert sums != sorted(sums), "it is shuffled"
    episodes = [(each["config"]["index"], [str(right)]) for each, right in zip(listed, sums, strict=True)]
    assert await play_all(f"inspect+python={PYTHON}:{task}", episodes) == [1.0] * len(listed)


@pytest.mark.parametrize(("said", "score"), [("It is 2.", 1.0), ("Hm.", 0.0)])
async def test_an_agent_that_never_ends_is_scored_as_it_stands_where_turns_run_out(
    said: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "MAX_TURNS", 3)
    assert await playing.play_all(f"inspect+python={PYTHON}:{SMALL}@sums_with_a_tool", [(5, [said])], pad=said) == [score]
