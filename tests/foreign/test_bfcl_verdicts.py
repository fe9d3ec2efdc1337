"""Verdicts of `bfcl-eval` through the adapter: those of its own loop and evaluation on the same answers, of four kinds.

BFCL_TASKS is how many tasks of each category are played, ten by default; 200 is all of them.
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
PYTHON = os.environ.get("BFCL_PYTHON", str(ROOT / ".venv-bfcl/bin/python"))
COUNT = int(os.environ.get("BFCL_TASKS", "10"))
ORIGINAL = str(Path(__file__).with_name("original_verdicts.py"))
SPEC = f"bfcl+python={PYTHON}:multi_turn"
SCENARIOS = 200

Turns = list[list[Any]]
"""Calls by turn of the user."""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(7200)]


def answer_turns(turns: Turns) -> list[Any]:
    """A step with the calls of a turn, then a text, which ends it."""
    return [answer for calls in turns for answer in ([calls, "done"] if calls else ["done"])]


def answer_reference(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    return answer_turns(turns)


def answer_nothing(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    return ["done" for _ in turns]


def answer_permuted(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    """Another task's calls; or the task's own in another order, of its turns or of its calls."""
    shuffled = draw.sample(turns, len(turns))
    return answer_turns(draw.choice([other, shuffled, [calls[::-1] for calls in turns]]))


def answer_wrongly(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    """The reference but for one call: another value, left out, made twice, a tool that there is not, or no call at all."""
    wrong = [[[name, dict(arguments)] for name, arguments in calls] for calls in turns]
    calls = draw.choice([each for each in wrong if each])
    name, arguments = call = draw.choice(calls)
    kind = draw.choice(["value", "less", "twice", "tool", "python", "text"])
    if kind == "value" and arguments:
        key = draw.choice(list(arguments))
        arguments[key] = draw.choice([f"{arguments[key]}x", 7, None, [arguments[key]]])
    elif kind == "twice":
        calls.append(call)
    elif kind == "tool":
        call[0] = f"{name}_please"
    elif kind == "python":
        arguments["1) or print(2"] = 0
    else:
        calls.remove(call)
    answers = answer_turns(wrong)
    return ["I will not.", *answers[1:]] if kind == "text" else answers


KINDS: dict[str, Callable[[Turns, Turns, random.Random], list[Any]]] = {
    "reference": answer_reference,
    "empty": answer_nothing,
    "permuted": answer_permuted,
    "wrong": answer_wrongly,
}


async def ask_original(*words: str) -> Any:
    done = await anyio.run_process([PYTHON, ORIGINAL, *words], stderr=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
async def test_verdicts_are_those_of_the_packages_own_evaluation(kind: str, tmp_path: Path) -> None:
    references: dict[str, Turns] = await ask_original("--reference")
    keys, draw = list(references), random.Random(kind)
    episodes = []
    for place, key in enumerate(keys):
        answers = KINDS[kind](references[key], references[keys[place - 1]], draw)
        if place % SCENARIOS % (SCENARIOS // COUNT) == 0:
            episodes.append((key, answers))
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    theirs = await ask_original(str(file))
    ours = await play_all(SPEC, episodes)
    equal = sum(mine == its for mine, its in zip(ours, theirs, strict=True))
    print(f"{kind}: {equal} of {len(theirs)} equal; valid: {sum(theirs):g}; excluded: {ours.count(None)}")
    assert ours == theirs
    if kind in ("reference", "empty"):
        assert set(ours) == {float(kind == "reference")}


async def test_what_is_no_call_of_a_tool_is_never_evaluated(tmp_path: Path) -> None:
    """BFCL hands to Python's ``eval`` what the policy wrote: its own evaluation would make these files."""
    files = [tmp_path / str(number) for number in range(3)]
    opened = f"open({str(files[0])!r}, 'w')"
    calls = [
        ["open", {"file": str(files[1]), "mode": "w"}],
        [f"{opened} or ls", {}],
        ["ls", {f"a={opened}, b": True}],
        ["ls", {f"**dict(a={opened}), b": True}],
        ["ls", {f"a=True) or open({str(files[2])!r}, 'w', buffering": -1}],
    ]
    verdicts = await play_to_verdicts(
        SPEC.replace("multi_turn", "multi_turn_base"), [("multi_turn_base_0", [[each] for each in calls])]
    )
    assert [verdict.reward for verdict in verdicts if verdict] == [0.0]
    assert not any(file.exists() for file in files)
