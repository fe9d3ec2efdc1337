"""The wheel in a project of somebody else, whose own packages are called `schemas`, `workers` and `tests`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from fleetbus.bus.nats.server import find_server

ROOT = Path(__file__).resolve().parents[2]
OURS = ("fleetbus", "__editable__", "_fleetbus")

ENVIRONMENT = """
import re
from fleetbus import ChatMessage, Start, Step, Verdict
from schemas import Item

class Mine:
    replayable = True

    async def open(self, task):
        self.item, self.right = Item(str(task.seed % 10)), False

    async def reset(self):
        return Start(messages=(ChatMessage(role="user", content=f"Say {self.item.name}."),))

    async def step(self, action):
        self.right = self.item.name in re.findall("[0-9]", action.text)
        return Step(terminated=True)

    async def state(self):
        return {}

    async def verify(self):
        return Verdict(reward=float(self.right))

    async def close(self):
        pass
"""

PROJECT = {
    "schemas/__init__.py": "class Item:\n    def __init__(self, name):\n        self.name = name\n",
    "schemas/inner.py": ENVIRONMENT,
    "workers/__init__.py": "",
    "workers/jobs.py": "ANSWER = 42\n",
    "mine.py": ENVIRONMENT,
    "random_tools.py": "",
    "tests/__init__.py": "",
    "tests/test_own.py": (
        "from schemas import Item\nfrom workers.jobs import ANSWER\n\n"
        "def test_own(nats_server, memory_bus):\n"
        "    assert ANSWER == 42 and Item('a').name == 'a' and nats_server.url.startswith('nats://')\n"
    ),
    "tasks.json": json.dumps([{"key": f"t{seed}", "prompt": "p", "env_key": "mine", "seed": seed} for seed in range(40)]),
}


def install_wheel(folder: Path) -> tuple[Path, Path]:
    """The wheel, and the ``bin`` of an environment that holds it beside this one's other packages, and nothing of the tree."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    packages = next((folder / "venv/lib").iterdir()) / "site-packages"
    here = next(Path(path) for path in sys.path if path.endswith("site-packages") and (Path(path) / "msgspec").exists())
    for path in here.iterdir():
        if not path.name.startswith(OURS) and path.name != "__pycache__":
            (packages / path.name).symlink_to(path)
    target = ["--python", str(folder / "venv/bin/python"), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *target], check=True, timeout=120, capture_output=True)
    (folder / "venv/bin/nats-server").symlink_to(find_server())
    return wheel, folder / "venv/bin"


def write_project(folder: Path) -> Path:
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_lives_beside_packages_called_schemas_workers_and_tests(tmp_path: Path) -> None:
    wheel, programs = install_wheel(tmp_path)
    project = write_project(tmp_path / "project")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLEETBUS_", "PYTEST_", "PYTHON"))}

    def run(*command: str, status: int = 0) -> str:
        program = [str(programs / command[0]), *command[1:]]
        done = subprocess.run(program, cwd=project, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fleetbus", "fleetbus_schemas", "fleetbus_workers"}
    files = zipfile.ZipFile(wheel).namelist()
    for wanted in ("starter/policy/model.safetensors", "monitor/page/index.html", "licenses/LICENSE", "fleetbus/py.typed"):
        assert any(name.endswith(wanted) for name in files), wanted

    where = run("python", "-P", "-c", "import fleetbus, fleetbus_workers; print(fleetbus.__file__, fleetbus_workers.__file__)")
    assert where.count(str(tmp_path / "venv")) == 2, where

    small = ("--learner-groups", "2", "--learner-group-size", "2", "--evaluation-episodes", "4", "--environment-slots", "4")
    assert "2 steps" in run(
        "fleetbus", "up", "--steps", "2", "--environment", "mine:Mine", "--tasks", "tasks.json", "--run", "a", *small
    )
    assert "1 steps" in run(
        "fleetbus", "up", "--steps", "1", "--environment", "schemas.inner:Mine", "--tasks", "tasks.json", "--run", "b", *small
    )
    assert "1 passed" in run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 passed" in run("python", "-c", "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))")
    for role in (
        ("environment",),
        ("inference",),
        ("learner",),
        ("recorder", "--archive", "a"),
        ("gateway", "gym", "--port", "0"),
    ):
        assert "no NATS server" in run("fleetbus", *role, "--nats", "nats://127.0.0.1:1", status=2)
