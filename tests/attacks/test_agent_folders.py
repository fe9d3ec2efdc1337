"""An agent in the folder of its run, laid out as docs/agents.md shows it: what lies beside it stays unread."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone

AGENT = Path(__file__).with_name("hostile_agent.py")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="agents are confined on Linux"),
    pytest.mark.timeout(120),
    pytest.mark.integration,
]

anyio_backend = asyncio_alone

SECRET = ("tasks.json", "held_out.json", "held-out/more.json", "fleetbus.toml", "verifiers.py", "other_agent.py", ".env")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as of docs/agents.md, which is the working folder, and on the path of imports."""
    try:
        require_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    folder = tmp_path / "mine"
    for name in (*SECRET, "my_package/__init__.py", "my_package/part.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("# the answer is 4711")
    for name in ("my_agent.py", "my_package/agent.py"):
        shutil.copy(AGENT, folder / name)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in ("my_agent", "my_package", "my_package.agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


async def list_read(spec: str, *paths: Path, **settings: Any) -> list[str]:
    """What an agent could read of these, and of its folder."""
    run = RunSettings(tasks=settings.pop("tasks", "tasks.json"))
    configuration = Configuration(run=run, environment=EnvironmentSettings(agent_isolation="required", **settings))
    factory = build_environment_factory(spec, verifier=None, configuration=configuration)  # type: ignore[arg-type]
    async with factory.run():
        environment: Any = factory()
        try:
            given = [str(path) for path in paths]
            task = Task(key="t", prompt="p", config={"attack": "read_files", "with": given}, verifier="graded")
            await environment.open(task)
            found = json.loads((await environment.reset()).messages[0].content)
        finally:
            await environment.close()
    return sorted(Path(path).name for path, content in found.items() if "4711" in content)


@pytest.mark.parametrize("form", ["function", "command"])
async def test_tasks_held_out_tasks_verifiers_and_configuration_beside_an_agent_stay_unread(form: str, folder: Path) -> None:
    spec = "agent:my_agent:play" if form == "function" else f"agent:{sys.executable} {folder}/my_agent.py"
    assert await list_read(spec, *(folder / name for name in SECRET)) == []


async def test_a_package_is_seen_without_the_tasks_in_it(folder: Path) -> None:
    tasks = folder / "my_package" / "tasks.json"
    tasks.write_text("4711")
    paths = [tasks, folder / "my_package" / "part.py", *(folder / name for name in SECRET)]
    assert await list_read("agent:my_package.agent:play", *paths, tasks=str(tasks)) == ["part.py"]


async def test_what_is_listed_is_read(folder: Path) -> None:
    listed = f"{folder}/verifiers.py,{folder}/tasks.json"
    paths = [folder / name for name in SECRET]
    assert await list_read("agent:my_agent:play", *paths, agent_files=listed) == ["tasks.json", "verifiers.py"]


async def test_what_is_hidden_is_hidden_where_a_link_leads_to_it_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    linked = tmp_path / "link" / "my_package"
    (folder / "my_package" / "tasks.json").write_text("# the answer is 4711")
    spec = f"agent:{sys.executable} {linked}/agent.py {linked}"
    tasks = str(folder / "my_package" / "tasks.json")
    paths = [linked / "tasks.json", linked / "part.py"]
    assert await list_read(spec, *paths, tasks=tasks) == ["part.py"]
