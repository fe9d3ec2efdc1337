"""Sources of tasks: files, folders, URLs and versions, and the one line that each mistake gets."""

from __future__ import annotations

import functools
import hashlib
import http.server
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus.tasks.datasets import read_dataset_files, redact_location, split_version
from fleetbus.tasks.files import build_task_entry, check_dataset, check_verifiers, dump_tasks, load_dataset, load_tasks
from fleetbus.tasks.output import write_split
from fleetbus_schemas import Task
from fleetbus_workers.environment.isolation.sandbox import inside


def tasks(*keys: str, env: str = "") -> list[Task]:
    return [Task(key=key, prompt="Do it.", env=env) for key in keys]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two versions, laid out as Fleet's bucket is, and a folder of two files."""
    for version, keys in (("v0.1", ("a",)), ("v0.2", ("a", "b"))):
        folder = tmp_path / "data" / version / "openenv"
        folder.mkdir(parents=True)
        dump_tasks(tasks(*keys), folder / "all_tool_use.json")
    dump_tasks(tasks("c"), tmp_path / "data" / "v0.2" / "openenv" / "all_computer_use.json")
    return tmp_path / "data"


def keys(location: object) -> list[str]:
    return [task.key for task in load_dataset(str(location))]


def test_a_version_is_a_folder_below_the_location_and_its_name_is_in_every_task(store: Path) -> None:
    assert keys(f"{store}@v0.1") == ["a"]
    assert {task.dataset_version for task in load_dataset(f"{store}@v0.2")} == {"v0.2"}
    assert sorted(keys(f"{store}@v0.2")) == ["a", "b", "c"]


def test_a_version_stands_where_the_location_says_so(store: Path) -> None:
    assert keys(f"{store}/{{version}}/openenv/all_tool_use.json@v0.2") == ["a", "b"]


def test_without_a_version_the_bytes_are_the_version(store: Path) -> None:
    file = store / "v0.1" / "openenv" / "all_tool_use.json"
    (before,) = load_dataset(str(file))
    inner = hashlib.sha256(file.read_bytes()).digest()
    assert before.dataset_version == f"sha256:{hashlib.sha256(inner).hexdigest()[:16]}"
    dump_tasks(tasks("other"), file)
    assert load_dataset(str(file))[0].dataset_version != before.dataset_version


def test_a_file_whose_name_has_a_version_s_mark_is_a_file(tmp_path: Path) -> None:
    dump_tasks(tasks("a"), tmp_path / "tasks@home.json")
    assert keys(tmp_path / "tasks@home.json") == ["a"]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("{store}@v0.9", "has no version v0.9; there are v0.1, v0.2"),
        ("{store}/{{version}}/openenv/all_tool_use.json@v9", "has no version v9; there are v0.1, v0.2"),
        ("{store}/{{version}}/x.json", "end it with @VERSION"),
        ("{store}@v 1", "is not a version"),
        ("{store}@", "is not a version"),
        ("{store}/absent.json", "there is no such file"),
        ("{store}", "is a folder without tasks files"),
        ("nowhere://bucket/x.json", "is not supported by fsspec"),
        ("memory://nothing/x.json", "there is nothing"),
        ("memory://nothing@v1", "there is no version v1"),
    ],
)
def test_a_wrong_location_gets_one_line(store: Path, location: str, words: str) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UserError) as caught:
        load_dataset(location.format(store=store))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_are_unique_in_all_files_together(store: Path) -> None:
    dump_tasks(tasks("a"), store / "v0.2" / "openenv" / "again.json")
    with pytest.raises(UserError, match=r"have the same key \(a\)"):
        load_dataset(f"{store}@v0.2")


def test_everything_that_is_wrong_is_listed(tmp_path: Path) -> None:
    entries = [{"key": "a"}, {"prompt": "p"}, {"key": "b", "prompt": "p", "seed": "x"}, {"key": "c", "prompt": "p"}]
    (tmp_path / "t.json").write_text(json.dumps(entries))
    found, problems = check_dataset(str(tmp_path / "t.json"))
    assert [task.key for task in found] == ["c"]
    assert [problem.partition(": ")[2][:6] for problem in problems] == ["task 1", "task 2", "task 3"]


def test_verifiers_that_are_no_python_are_named() -> None:
    wrong = Task(key="w", prompt="p", verifier="def verify(env):\n return (")
    assert check_verifiers([Task(key="t", prompt="p", verifier="def verify(): return 1"), wrong]) == [
        "task w: its verifier is no Python: '(' was never closed (line 2)"
    ]


@pytest.mark.parametrize(
    ("code", "parameter"),
    [
        ("def verify(env, answer): return 1", "answer"),
        ("async def grade(env, *, gold): return 1", "gold"),
        ("def verify(environment, **rest): return 1", "environment"),
        ("import re\nif re:\n    def verify(env, final_answer, a, b=1): return 1", "a"),
    ],
)
def test_a_verifier_that_asks_for_what_it_will_not_get_is_refused(code: str, parameter: str) -> None:
    with pytest.raises(TypeError):
        call(code)
    assert check_verifiers([Task(key="t", verifier=code)]) == [
        f"task t: its verifier has the parameter '{parameter}'; what it gets is named env, final_answer, conversation"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "def verify(e, conversation, final_answer, x=1, *more, y=2): return 1",
        "def verify(answer): return 1",
        "def verify(conversation, env, **rest): return 1",
        "def verify(*, env): return 1",
        "def verify(*rest): return 1",
        "import functools\ndef verify(env, gold): return gold\nverify = (lambda f: lambda env: f(env, 1))(verify)",
        "def fill(f): return lambda env: f(env, 1)\n@fill\ndef verify(env, gold): return gold",
        "def verify(env, gold): return gold\nverify.__defaults__ = (1,)",
        "def verify(a, b): return b\ndef verify(env): return 1",
        "class Case:\n    def verify(self, a): return a\ndef verify(env): return Case().verify(1)",
        "def helper(a, b): return a\ndef verify(env): return helper(1, 2)",
    ],
)
def test_a_verifier_that_can_be_called_with_what_it_gets_is_accepted(code: str) -> None:
    assert call(code) == 1
    assert check_verifiers([Task(key="t", verifier=code)]) == []


def call(code: str) -> object:
    """The verdict of a verifier, called as its process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(inside.__file__).parent)
        call_verifier = importlib.import_module("verifier_call").call_verifier
    return call_verifier(
        compile(code, "<verifier>", "exec"), {"final_answer": "", "conversation": []}, SimpleNamespace(ask=None)
    )


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(store: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(store))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_is_read_over_http_in_a_version(web: str) -> None:
    pytest.importorskip("aiohttp")
    (task,) = load_dataset(f"http://{web}/{{version}}/openenv/all_tool_use.json@v0.1")
    assert (task.key, task.dataset_version) == ("a", "v0.1")
    with pytest.raises(UserError, match=r"no version v7"):
        load_dataset(f"http://{web}/{{version}}/openenv/all_tool_use.json@v7")


def test_a_file_of_lines_is_read_over_http(web: str, store: Path) -> None:
    pytest.importorskip("aiohttp")
    (store / "lines.jsonl").write_text('{"key": "a", "prompt": "x"}\n{"key": "b", "prompt": "x"}\n')
    assert keys(f"http://{web}/lines.jsonl") == ["a", "b"]


def test_credentials_of_a_url_are_in_no_error(web: str) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(UserError) as caught:
        load_dataset(f"http://ada:s3cret@{web}/absent.json?token=s3cret")
    assert "s3cret" not in str(caught.value) and "absent.json" in str(caught.value)
    assert redact_location("https://ada:s3cret@host/x.json?token=s3cret") == "https://host/x.json"


@pytest.mark.slow
def test_a_bucket_is_read_in_a_version(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    import fsspec

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "s3cret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="fleet")
        for file in store.rglob("*.json"):
            client.put_object(Bucket="fleet", Key=str(file.relative_to(store)), Body=file.read_bytes())
        client.close()
        assert sorted(keys("s3://fleet@v0.2")) == ["a", "b", "c"]
        assert keys("s3://fleet/{version}/openenv/all_tool_use.json@v0.1") == ["a"]
        with pytest.raises(UserError, match=r"has no version v3; there are v0.1, v0.2"):
            load_dataset("s3://fleet@v3")
    finally:
        running.stop()
        fsspec.filesystem("s3").clear_instance_cache()


def test_a_version_is_told_from_a_location() -> None:
    assert split_version("s3://bucket/data@v1") == ("s3://bucket/data", "v1")
    assert split_version("https://me@host/data.json") == ("https://me@host/data.json", "")


def test_parquet_is_written_and_read_back_without_loss(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    first = Task(
        key="é",
        prompt="p",
        env="e",
        version="2",
        verifier="c",
        seed=3,
        env_variables={"A": 1},
        config={"data_id": "d", "deep": [1]},
    )
    second = Task(key="b", prompt="q", env="e")
    write_split(tmp_path, [first, second], [], formats=("parquet", "json"))
    assert load_tasks(tmp_path / "train.json") == [first, second]
    assert [build_task_entry(task) for task in load_dataset(str(tmp_path / "train.parquet"))] == [
        build_task_entry(first),
        build_task_entry(second),
    ]
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert rows[0]["prompt"] == [{"role": "user", "content": "p"}]
    assert [row["data_source"] for row in rows] == ["e", "e"]
    assert (rows[0]["env_version"], rows[0]["data_key"]) == ("2", "d")
    assert rows[1]["env_variables"] == '{"A": 1}', "those of its environment"


def test_parquet_of_fleets_data_preparation_is_understood(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {
        "prompt": [{"role": "user", "content": "Find a flight."}],
        "env_class": "fleet_task",
        "task_key": "task-001",
        "data_source": "booking",
        "env_version": "v1",
        "env_variables": '{"A": 1}',
        "env_variable_keys": '["A"]',
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (task,) = load_dataset(str(tmp_path / "train.parquet"))
    assert (task.key, task.prompt, task.env, task.version) == ("task-001", "Find a flight.", "booking", "v1")
    assert task.env_variables == {"A": 1}


def test_what_is_no_parquet_gets_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="is not a Parquet file of tasks"):
        load_dataset(str(tmp_path / "x.parquet"))


def test_missing_packages_are_named_with_their_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fsspec", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "x.parquet").write_bytes(b"x")
    for location in (str(tmp_path / "x.parquet"), "https://127.0.0.1/x.json"):
        with pytest.raises(UserError, match=r"pip install 'fleetbus\[datasets\]'"):
            load_dataset(location)


def test_a_split_replaces_what_an_earlier_one_left(tmp_path: Path) -> None:
    write_split(tmp_path, tasks("a"), tasks("b"), formats=("json",))
    assert {path.name for path in tmp_path.iterdir()} == {"train.json", "validation.json"}
    written = write_split(tmp_path, tasks("c"), [], formats=("json",))
    assert written == [tmp_path / "train.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"train.json"}
    assert read_dataset_files(str(tmp_path)).sources[0].data == (tmp_path / "train.json").read_bytes()
