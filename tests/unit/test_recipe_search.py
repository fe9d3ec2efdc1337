"""The recipe `search`: what its tool finds, that its questions can be answered with it, and that its examples are true."""

from __future__ import annotations

import json
import re

import pytest

from fleetbus.tasks.files import load_dataset
from fleetbus.user_code import load_callable
from fleetbus_workers.learner.curriculum import load_split
from fleetbus_workers.up.recipes import find_recipe, write_tasks

RECIPE = find_recipe("search")
find_passage = load_callable("recipe search", f"{RECIPE.folder / 'server.py'}:find_passage")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def read_name(prompt: str) -> str:
    found = re.fullmatch(r"In which year (?:was|did) (.*) (?:born|die)\?", prompt)
    assert found
    return found[1]


def test_a_name_finds_its_own_passage_and_the_answer_stands_in_it() -> None:
    tasks = load_dataset(str(write_tasks(RECIPE)))[::20]
    found = [(task, find_passage(read_name(task.prompt))) for task in tasks]
    own = [(task, passage) for task, passage in found if passage.startswith(f"{read_name(task.prompt)}: ")]
    assert len(own) > 0.9 * len(tasks)
    for task, passage in own:
        assert re.findall(r"\d{4}", passage)[task.key.startswith("died")] == task.config["answer"]


def test_a_person_whom_the_held_out_questions_are_about_is_asked_for_in_no_other() -> None:
    train, held_out = load_split(str(write_tasks(RECIPE)), 0.1)
    assert not {read_name(task.prompt) for task in train} & {read_name(task.prompt) for task in held_out}


def test_worked_examples_are_what_the_tool_answers_and_are_asked_in_no_task() -> None:
    examples = json.loads((RECIPE.folder / "examples.json").read_bytes())
    asked = {task.prompt for task in load_dataset(str(write_tasks(RECIPE)))}
    for question, call, result, answer in zip(*(examples[first::4] for first in range(4)), strict=True):
        query = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["query"]
        assert query == read_name(question["content"]) and not any(query in prompt for prompt in asked)
        assert result["content"] == f"Tool result:\n{find_passage(query)}"
        died = question["content"].endswith("die?")
        assert answer["content"] == f"{re.findall(r'[0-9]{4}', result['content'])[died]} <done>"


@pytest.mark.parametrize("query", ["", "_", "*", '"', '") OR (x', "NOT", "a NEAR b", "passage : x", "Ångström\0", "x " * 400])
def test_any_query_is_answered(query: str) -> None:
    assert isinstance(find_passage(query), str)
