"""An agent that lies and grabs: it reaches nothing but its session, holds no more than it may, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from structlog.testing import capture_logs

from fleetbus.config.settings import Configuration, EnvironmentSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.agent import host as agent_host
from fleetbus_workers.environment.adapters.agent.environment import AgentEnvironment
from fleetbus_workers.environment.adapters.agent.host import PREFIX, sweep
from fleetbus_workers.environment.adapters.agent.process import AgentLimits, AgentProcess
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone
from tests.support.processes import until, wait_for_output

AGENT = Path(__file__).with_name("hostile_agent.py")
SPEC = f"agent:{sys.executable} {AGENT}"
ACTION = Action(episode_id="e", attempt=1, turn=0, text="go on")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="agents are confined on Linux"),
    pytest.mark.timeout(120),
    pytest.mark.integration,
]

anyio_backend = asyncio_alone


@pytest.fixture
def isolated() -> None:
    try:
        require_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))


def build_factory(**settings: Any) -> Any:
    run = RunSettings(folder=settings.pop("folder", ".fleetbus/runs"))
    configuration = Configuration(run=run, environment=EnvironmentSettings(**{"agent_reward_url": True} | settings))
    return build_environment_factory(SPEC, verifier=None, configuration=configuration)  # type: ignore[arg-type]


@asynccontextmanager
async def opened(factory: Any, attack: str, *given: Any, **config: Any) -> AsyncIterator[AgentEnvironment]:
    environment: Any = factory()
    try:
        await environment.open(Task(key="t", prompt="p", config={"attack": attack, "with": list(given), **config}))
        yield environment
    finally:
        await environment.close()


async def told(environment: AgentEnvironment) -> Any:
    return json.loads((await environment.reset()).messages[0].content)  # type: ignore[arg-type]


MARK = f"left-behind-{os.getpid()}"


def left_behind() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if MARK in (process.info["cmdline"] or ())[-1:]]


def find_folders(worker: int) -> list[Path]:
    """Those of one process: tests that run beside this one have theirs in the same place."""
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*_{worker}_*"))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for process in left_behind():
        process.kill()


async def test_an_agent_reads_neither_the_workers_variables_nor_its_files(isolated: None, tmp_path: Path) -> None:
    keys = tmp_path / "runs" / "default" / "keys"
    keys.mkdir(parents=True)
    (keys / "worker.creds").write_text("NKEY")
    factory = build_factory(folder=str(tmp_path / "runs"))
    paths = [str(keys), str(keys / "worker.creds"), str(Path.home() / ".ssh"), "/etc/shadow", str(AGENT.parents[2] / ".git")]
    paths += ["/proc/1/environ", "/proc/self/../1/environ", tempfile.gettempdir() + "/" + PREFIX]
    async with factory.run(), opened(factory, "read_files", *paths) as environment:
        found = await told(environment)
        labels = [found.pop(path, "") for path in ("/proc/1/environ", "/proc/self/../1/environ")]  # bubblewrap's own
        assert not [
            line for text in labels for line in text.split("\0") if line and not line.startswith(("FLEETBUS_SERVER_", "LC_"))
        ]
        assert found == {}, "only what belongs to the agent is there"


async def test_an_agent_reaches_no_port_but_the_endpoint(isolated: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker:
        factory = build_factory()
        async with factory.run(), opened(factory, "connect", broker.getsockname()[1]) as environment:
            assert await told(environment) == "nothing"


async def test_what_an_agent_started_ends_with_it(isolated: None) -> None:
    factory = build_factory()
    async with factory.run(), opened(factory, "leave_grandchildren", MARK) as environment:
        assert await told(environment) == "left"
        assert len(left_behind()) == 2
        assert (await environment.step(ACTION)).terminated
        await until(lambda: not left_behind())


async def test_without_a_sandbox_what_carries_the_labels_ends_with_the_episode() -> None:
    factory = build_factory(agent_isolation="off")
    async with factory.run(), opened(factory, "leave_grandchildren", MARK) as environment:
        assert await told(environment) == "left"
    await until(lambda: len(left_behind()) == 1)  # a process that hid its labels stays: isolation is there for that


WORKER = f"""
import sys, anyio
from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.specs import build_environment_factory

async def main():
    settings = Configuration(environment=EnvironmentSettings(agent_isolation=sys.argv[2], agent_reward_url=True))
    factory = build_environment_factory({SPEC!r}, verifier=None, configuration=settings)
    async with factory.run():
        environment = factory()
        await environment.open(Task(key="t", prompt="p", config={{"attack": "leave_grandchildren", "with": [sys.argv[1]]}}))
        await environment.reset()
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("isolation", ["required", "off"])
async def test_a_successor_finds_nothing_left_of_a_killed_worker(isolation: str, request: pytest.FixtureRequest) -> None:
    if isolation == "required":
        request.getfixturevalue("isolated")
    async with await anyio.open_process([sys.executable, "-c", WORKER, MARK, isolation], stderr=None) as worker:
        await wait_for_output(worker.stdout, b"ready")
        left = len(left_behind())
        worker.kill()
    assert left == 2
    if isolation == "required":
        await until(lambda: not left_behind())
    assert find_folders(worker.pid)
    await anyio.to_thread.run_sync(sweep)
    assert not find_folders(worker.pid)
    await until(lambda: len(left_behind()) == (0 if isolation == "required" else 1))


@pytest.mark.usefixtures("isolated")
async def test_a_sandbox_that_nobody_told_of_its_workers_death_ends_with_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifelines: list[int] = []
    monkeypatch.setattr(AgentProcess, "tie", lambda agent, lifeline: lifelines.append(lifeline))
    factory = build_factory(agent_isolation="required")
    async with factory.run(), opened(factory, "leave_grandchildren", MARK) as environment:
        await environment.reset()
        assert len(left_behind()) == 2
        os.close(lifelines.pop())
        await until(lambda: not left_behind())


@pytest.mark.parametrize(("attack", "given", "named"), [("fill_folder", [96], "working folder"), ("fill_memory", [], "memory")])
@pytest.mark.parametrize("isolation", ["auto", "off"])
async def test_an_agent_that_takes_too_much_is_ended(
    attack: str, given: list[Any], named: str, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_host, "AgentLimits", lambda: AgentLimits(folder_bytes=32 << 20, memory_bytes=256 << 20))
    factory = build_factory(agent_isolation=isolation)
    with pytest.raises(EnvironmentFailed, match=named):
        async with factory.run(), opened(factory, attack, *given) as environment:
            await environment.reset()


async def test_an_agent_signals_nobody_else(isolated: None) -> None:
    async with await anyio.open_process([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        factory = build_factory()
        async with factory.run(), opened(factory, "kill_others") as environment:
            with anyio.move_on_after(20):
                try:
                    await told(environment)
                except EnvironmentFailed:
                    pass  # it killed its own way out
        alive = bystander.returncode is None
        bystander.kill()
    assert alive


async def test_a_key_that_ended_or_never_was_opens_nothing() -> None:
    factory = build_factory()
    async with factory.run():
        async with opened(factory, "use_other_key", "fbs-0") as first:
            assert await told(first) == "401 401"
            assert first._session is not None
            key = first._session.key
        async with opened(factory, "use_other_key", key) as second:
            assert await told(second) == "401 401"


async def test_without_a_sandbox_a_line_says_so_or_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise IsolationUnavailable("no sandbox works here (none)")

    monkeypatch.setattr(agent_host, "require_isolation", refuse)
    with capture_logs() as lines:
        build_factory()
    (line,) = [line for line in lines if line["log_level"] == "warning"]
    assert "running agents as this user" in line["event"]
    for settings in ({"agent_isolation": "required"}, {"sandbox": "required"}):
        with pytest.raises(UserError, match="no sandbox works here"):
            build_factory(**settings)
