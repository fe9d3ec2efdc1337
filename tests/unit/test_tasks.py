"""Tasks files: what is understood, and the one line that each mistake gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.errors import UserError
from fleetbus.tasks.files import build_tasks, dump_tasks, load_tasks
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks

ENTRY = {"key": "t1", "prompt": "Do it."}


def write(folder: Path, content: Any) -> Path:
    file = folder / "tasks.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_fleet_export_is_understood(tmp_path: Path) -> None:
    entry = {
        "key": "task-001",
        "prompt": "Search for flights from NYC to LA",
        "env_id": "booking-com",
        "version": "v1.2.3",
        "task_modality": "computer_use",
        "verifier_func": "async def verify(env): ...",
        "env_variables": '{"CURRENT_DATE": "2026-01-01"}',
        "seed": 3,
        "data_id": "d7",
        "difficulty": 2,
    }
    assert load_tasks(write(tmp_path, {"tasks": [entry]})) == [
        Task(
            key="task-001",
            prompt="Search for flights from NYC to LA",
            env="booking-com",
            version="v1.2.3",
            modality="computer_use",
            verifier="async def verify(env): ...",
            env_variables={"CURRENT_DATE": "2026-01-01"},
            seed=3,
            config={"data_id": "d7", "difficulty": 2},
        )
    ]


def test_other_names_of_the_same_fields_are_understood(tmp_path: Path) -> None:
    entry = {
        "task_key": "t",
        "prompt": "p",
        "env_key": "e",
        "env_id": "x",
        "env_version": "2",
        "version": "1",
        "verifier_code": "c",
    }
    assert load_tasks(write(tmp_path, [entry])) == [Task(key="t", prompt="p", env="e", version="2", verifier="c")]


@pytest.mark.parametrize("name", ["env_key", "env_id", "env"])
def test_every_name_of_the_environment_is_understood_and_one_is_written(name: str, tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path, [ENTRY | {name: "lakes"}]))
    assert (task.env, task.config) == ("lakes", {})
    dump_tasks([task], tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["tasks"][0]["env_key"] == "lakes"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tasks = [
        *build_train_tasks(3, seed=1),
        Task(key="é", prompt="p", config={"key": "clash", "config": {"a": 1}, "b": None}, env_variables={"X": 1}),
    ]
    dump_tasks(tasks, tmp_path / "tasks.json")
    assert load_tasks(tmp_path / "tasks.json") == tasks


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(config=st.dictionaries(st.sampled_from(["key", "config", "seed", "data_id", "tasks"]) | st.text(), JSON, max_size=4))
@settings(deadline=None, max_examples=50)
def test_any_config_survives(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("tasks") / "tasks.json"
    task = Task(key="t", prompt="p", config=config)
    dump_tasks([task], file)
    assert load_tasks(file) == [task]


MISTAKES: list[tuple[str, Any, str]] = [
    ("empty file", " \n", "is empty"),
    ("not JSON", '{"tasks": [\n  {"key": }]}', "is not JSON: line 2, column 11"),
    ("too deep", "[" * 100_000, "cannot be read as JSON"),
    ("wrong shape", "3", "holds a number"),
    ("object without tasks", {"task": []}, 'has no "tasks"'),
    ("tasks of the wrong shape", {"tasks": {"a": 1}}, "holds an object"),
    ("no tasks", {"tasks": []}, "contains no tasks"),
    ("task that is no object", [ENTRY, "t2"], "task 2 is text"),
    ("no key", [ENTRY, {"prompt": "p"}], "task 2 has no key"),
    ("key that is no text", [{"key": 5, "prompt": "p"}], "task 1: key is a number; it must be text"),
    ("key that is zero", [{"task_key": 0, "prompt": "p"}], "task 1: task_key is a number; it must be text"),
    ("key that is empty", [{"key": "", "prompt": "p"}], "task 1 has no key"),
    ("same key twice", [ENTRY, {"key": "t2", "prompt": "p"}, ENTRY], "tasks 1 and 3 have the same key (t1)"),
    ("no prompt", [{"key": "t1"}], "task 1 (t1) has no prompt"),
    ("prompt that is a list", [{"key": "t1", "prompt": []}], "task 1 (t1): prompt is a list; it must be text"),
    ("JSON lines", '{"key": "t1"}\n{"key": "t2"}', "line 2, column 1: Extra data; tasks are read as JSON"),
    ("blank prompt", [{"key": "t1", "prompt": " "}], "task 1 (t1) has no prompt"),
    ("prompt that is null", [{"key": "t1", "prompt": None}], '"" if the environment gives it'),
    ("environment that is no text", [ENTRY | {"env_id": 3}], "task 1 (t1): env_id is a number"),
    ("variables that are no JSON", [ENTRY | {"env_variables": "{"}], "task 1 (t1): env_variables is text that is not JSON"),
    ("variables that are a list", [ENTRY | {"env_variables": [1]}], "task 1 (t1): env_variables is a list"),
    ("seed that is no number", [ENTRY | {"seed": "1"}], "task 1 (t1): seed is text"),
    (
        "name in config and beside it",
        [ENTRY | {"config": {"tries": 3}, "tries": 9}],
        "task 1 (t1): 'tries' stands in config and",
    ),
    (
        "member twice",
        '[{"key": "t1", "prompt": "x", "prompt": "y"}]',
        "an object (its key is 't1') has 'prompt' twice; keep one",
    ),
    (
        "field of another case",
        [ENTRY | {"Config": {"a": 1}}],
        "'Config' is no field of a task; did you mean config?",
    ),
    ("key of another case", [{"Key": "t1", "prompt": "p"}], "task 1: 'Key' is no field of a task; did you mean key?"),
    ("number that no message carries", [ENTRY | {"limit": 1 << 70}], "task 1 (t1) cannot be sent"),
    ("task that is too large", [ENTRY | {"document": "x" * 300_000}], "262144 at most"),
]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sed", "seed"),
        ("sede", "seed"),
        ("seedd", "seed"),
        ("SEED", "seed"),
        ("evn", "env"),
        ("env_vesion", "env_version"),
        ("verifer_code", "verifier_code"),
        ("verifier_codd", "verifier_code"),
    ],
)
def test_a_mistyped_field_is_refused_and_stays_writable_inside_config(name: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"task 1 .t1.: '{name}' is no field of a task; did you mean {meant}.*inside"):
        load_tasks(write(tmp_path, [ENTRY | {name: 1}]))
    task = Task(key="t1", prompt="Do it.", config={name: 1})
    assert load_tasks(write(tmp_path, [ENTRY | {"config": {name: 1}}])) == [task]
    dump_tasks([task], tmp_path / "again.json")
    assert load_tasks(tmp_path / "again.json") == [task]


@pytest.mark.parametrize(
    "name",
    "seeds keys envs configs prompts versions prompt2 env_ids speed seen see need end en data_key data_version dev_version "
    "task_type verifier metadata".split(),
)
def test_a_name_like_a_field_that_is_one_of_its_own_becomes_config(name: str, tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path, [ENTRY | {name: 1}]))
    assert task.config == {name: 1}


def test_a_prompt_is_left_to_the_environment_by_saying_so(tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path, [{"key": "t1", "prompt": ""}]))
    assert task.prompt == ""


@pytest.mark.parametrize(("content", "words"), [pytest.param(row[1], row[2], id=row[0]) for row in MISTAKES])
def test_a_mistake_gets_one_line_with_file_and_place(tmp_path: Path, content: Any, words: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        load_tasks(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert words in message
    assert "\n" not in message


def test_a_file_of_lines_has_a_task_on_each_and_its_mistakes_are_placed(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"key": "a", "prompt": "x\u2028y"}\r\n\n{"key": "b", "prompt": "x"}\n')
    assert [task.key for task in load_tasks(file)] == ["a", "b"]
    file.write_text('{"key": "a", "prompt": "x"}\n{"key": }\n')
    with pytest.raises(UserError, match=r"is not JSON: line 2, column 9: Expecting value$"):
        load_tasks(file)


def test_a_file_of_another_form_is_told_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text("key,prompt\na,x\n")
    with pytest.raises(UserError, match=r"tasks are read as JSON \(.json\), JSON lines \(.jsonl\) or Parquet"):
        load_tasks(tmp_path / "tasks.csv")


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="file not found"):
        load_tasks(tmp_path / "absent.json")
    with pytest.raises(UserError, match="is a folder"):
        load_tasks(tmp_path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_bytes(b'["\xff"]')
    with pytest.raises(UserError, match=r"is not UTF-8 \(byte 2\)"):
        load_tasks(tmp_path / "tasks.json")


def test_a_task_whose_environment_gives_the_prompt_is_read_back() -> None:
    assert build_tasks([Task(key="t1")]) == build_tasks([{"key": "t1", "prompt": ""}]) == [Task(key="t1")]


class Numbered:
    """Entries by number alone, as a dataset of torch has them."""

    def __getitem__(self, number: int) -> dict[str, str]:
        return (ENTRY, ENTRY | {"key": "t2"})[number]


def test_whatever_gives_one_entry_after_the_other_is_a_list_of_tasks() -> None:
    for entries in (Numbered(), iter([ENTRY, ENTRY | {"key": "t2"}])):
        assert [task.key for task in build_tasks(cast("Any", entries))] == ["t1", "t2"]
    for wrong in (Task(key="t1"), ENTRY, dict, 3, None):
        with pytest.raises(UserError, match="must be a list of tasks, not"):
            build_tasks(cast("Any", wrong))
