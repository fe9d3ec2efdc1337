"""Servers that are started for an episode as processes of this machine, and what all kinds of them share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus.config.settings import Configuration, LimitSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.providers.base import wait_until_ready
from fleetbus_workers.environment.adapters.providers.process import ProcessProvider
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.ownership import build_process_owner, is_abandoned, sanitize_label
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children, until, wait_for_output
from tests.support.server_labels import GONE, labels
from tests.support.tool_calls import NoGrader

SERVER = Path(__file__).parents[1] / "support" / "mcp_environment_server.py"


def served(mode: str = "", *, ready_seconds: float = 50.0) -> EnvironmentFactory:
    configuration = Configuration(run=RunSettings(name="r1"), limits=LimitSettings(open=ready_seconds))
    spec = f"process:http:{sys.executable} {SERVER} {{port}} {mode}".strip()
    return build_environment_factory(spec, verifier=NoGrader(), configuration=configuration)


@pytest.mark.integration
async def test_an_episode_is_played_on_a_server_of_its_own_that_is_stopped_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETBUS_SECRET", "s3cret")
    factory = served()
    async with factory.run():
        first, second = factory(), factory()
        with anyio.fail_after(55):
            await first.open(Task(key="task 1", prompt="Look."))
            await first.reset()
            step = await first.step(Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=(ToolCall(name="look"),)))
            running = children()
            await first.close()
        assert "FLEETBUS_SERVER_RUN=r1 FLEETBUS_SERVER_EPISODE=task-1 FLEETBUS_SECRET=None" in str(step.messages[0].content)
        assert running
        await until(lambda: not children())
        await second.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("mode", "words"), [("fail", "ended before it was ready: exit code 1: no database"), ("hang", "not ready")]
)
async def test_a_server_that_never_answers_fails_its_episode_alone_and_is_stopped(mode: str, words: str) -> None:
    factory = served(mode, ready_seconds=2.0 if mode == "hang" else 50.0)
    async with factory.run():
        environment = factory()
        with pytest.raises(EnvironmentFailed, match=words):
            await environment.open(Task(key="t", prompt="p"))
        await environment.close()
        await until(lambda: not children())


async def test_an_episode_that_is_given_up_while_its_server_starts_leaves_nothing() -> None:
    factory = served("hang")
    async with factory.run():
        environment = factory()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.open, Task(key="t", prompt="p"))
            await until(lambda: bool(children()))
            tasks.cancel_scope.cancel()
        await environment.close()
        await until(lambda: not children())


async def test_servers_that_were_not_stopped_are_stopped_with_the_worker() -> None:
    provider = ProcessProvider(f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}")
    server = await provider.start(labels())
    await wait_until_ready(provider, server, path="/", seconds=50)
    await provider.close()
    await until(lambda: not children())
    await provider.stop(server)


WORKER = """
import anyio, sys
from fleetbus_workers.environment.adapters.providers.base import wait_until_ready
from fleetbus_workers.environment.adapters.providers.process import ProcessProvider
from fleetbus_workers.environment.ownership import Labels, build_process_owner

async def main():
    provider = ProcessProvider(f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}")
    server = await provider.start(Labels(run="r", episode="e", owner=build_process_owner(), expires=1 << 40))
    await wait_until_ready(provider, server, path="/", seconds=40)
    print("ready", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.integration
async def test_a_killed_worker_takes_its_servers_with_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER], stderr=None) as worker:
        await wait_for_output(worker.stdout, b"ready")
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert processes
    await until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the variables of processes")
async def test_a_sweep_ends_what_a_dead_worker_left_and_nothing_else() -> None:
    def left(owner: str, expires: int) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "FLEETBUS_SERVER_OWNER": owner, "FLEETBUS_SERVER_EXPIRES": str(expires)}
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=variables)

    mine = build_process_owner()
    dead = f"{mine.rpartition('_')[0]}_1"  # this process's id, but started at another time
    later = int(time.time()) + 600
    orphan, expired, living, foreign = left(dead, later), left(mine, 1), left(mine, later), left(GONE, later)
    try:
        removed = await ProcessProvider(f"{sys.executable} {{port}}").sweep()
        assert {str(orphan.pid), str(expired.pid)} <= set(removed)
        assert orphan.wait(20) == expired.wait(20) == -9
        assert living.poll() is None and foreign.poll() is None
    finally:
        for process in (orphan, expired, living, foreign):
            process.kill()
            process.wait()


def test_labels_are_such_that_every_system_takes_them() -> None:
    assert sanitize_label("warehouse-17") == "warehouse-17"
    assert sanitize_label("a task / with é") == "a-task---with"
    assert len(sanitize_label("x" * 99)) == 63
    assert all(sanitize_label(value) == value for value in labels().to_mapping().values())


def test_what_is_abandoned_is_told_from_what_is_not() -> None:
    mine = build_process_owner()
    assert not is_abandoned(mine, "2000", now=1999)
    assert is_abandoned(mine, "2000", now=2001)
    assert is_abandoned(f"{mine.rpartition('_')[0]}_1", "2000", now=1999)
    assert not is_abandoned(GONE, "2000", now=1999), "of another machine: only its time tells"
    assert not is_abandoned("", "", now=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("process:", "must name a kind"),
        ("process:openenv:", "must name a kind"),
        ("docker:warehouse:image", "must name a kind (openenv, remote-gym, http)"),
        ("process:http:python -m my_server", "must contain {port}"),
        ("process:http:no-such-command {port}", "command 'no-such-command' not found"),
        ("process:http:python '{port}", "cannot be read"),
    ],
)
def test_a_mistake_in_a_spec_gets_one_line(spec: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(spec, verifier=NoGrader())
    assert words in str(caught.value) and "\n" not in str(caught.value)
