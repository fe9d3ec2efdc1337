"""Tasks files and Harbor tasks that somebody else wrote. An input that begins with ``[`` or ``{`` after white space is JSON;
any other is the ``task.toml`` of a Harbor task.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.tasks.files import build_task_entry, check_verifiers, list_forgeable_verifiers, load_dataset
from fleetbus.tasks.harbor import check_harbor
from tests.fuzz.mutation import DEPTH, write_json
from tests.fuzz.targets import make_folder

TREE = (json.loads, write_json)
_FOLDER = make_folder()

TOML = """
schema_version = "1.4"
artifacts = ["/a", {source = "/b", service = "main"}]
multi_step_reward_strategy = "final"
[environment]
memory = "2G"
cpus = 1.5
allow_internet = false
env = {A = "b"}
[environment.healthcheck]
command = "true"
retries = 2
[[environment.mcp_servers]]
name = "s"
[agent]
timeout_sec = 1.0
user = 1
[verifier]
environment_mode = "separate"
collect = [{a = 1}]
[[steps]]
name = "one"
min_reward = {reward = 0.5}
[steps.agent]
network_mode = "public"
[[steps]]
name = "two"
min_reward = 0.5
"""


def run(data: bytes) -> None:
    """Read it as far as a run would, before anything starts."""
    if data.lstrip()[:1] in (b"{", b"["):
        _read_tasks(data)
    else:
        _read_harbor(data)


def _read_tasks(data: bytes) -> None:
    file = Path(_FOLDER.name, "tasks.json")
    file.write_bytes(data)
    try:
        tasks = load_dataset(str(file))
    except UserError as refused:
        assert str(refused)
        return
    problems = [*check_verifiers(tasks), *list_forgeable_verifiers(tasks)]
    json.dumps([problems, [build_task_entry(task) for task in tasks]])
    msgspec.msgpack.encode(tasks)


def _read_harbor(data: bytes) -> None:
    folder = Path(_FOLDER.name, "harbor", "a-task")
    if not folder.exists():
        for place in (folder, folder / "steps/one", folder / "steps/two"):
            (place / "tests").mkdir(parents=True)
            (place / "tests/test.sh").write_text("exit 0\n")
            (place / "instruction.md").write_text("do it\n")
        (folder / "environment").mkdir()
        shutil.copy(folder / "instruction.md", folder / "environment/Dockerfile")
    (folder / "task.toml").write_bytes(data)
    try:
        tasks, problems = check_harbor(f"harbor:{folder}")
    except UserError as refused:
        assert str(refused)
        return
    json.dumps(problems)
    msgspec.msgpack.encode(tasks)


def list_seeds() -> Iterator[bytes]:
    """A list of tasks, an object of them, and a Harbor task."""
    verifier = (
        "import re\ndef verify(env, answer='x'):\n    '''Grade.'''\n    return float(bool(re.search(answer, str(env))))\n"
    )
    task: dict[str, Any] = {
        "task_key": "k1",
        "prompt": "p",
        "env_id": "e",
        "env_version": "v1",
        "task_modality": "tool_use",
        "env_variables": '{"A": "b"}',
        "verifier_func": verifier,
        "seed": 1,
        "config": {"x": [1]},
        "other": 0.5,
    }
    yield json.dumps([task, task | {"task_key": "k2", "verifier_func": "verify = lambda env: 1.0"}]).encode()
    yield json.dumps({"tasks": [task, {"key": "k", "prompt": ""}]}, indent=1).encode()
    yield b"\xef\xbb\xbf" + json.dumps({"tasks": [task]}).encode()
    yield TOML.encode()
    yield TOML.encode() + b"x = " + b"[" * DEPTH + b"]" * DEPTH
    yield b'version = "1.0"\n[environment]\nmemory = "512M"\nstorage = "10G"\n'
