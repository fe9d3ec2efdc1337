"""The SkyRL environment class through the real `skyrl_gym`, on a real server, from threads and from coroutines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import skyrl_gym
from anyio.from_thread import start_blocking_portal
from skyrl_gym.envs.registration import deregister

from fleetbus.bus.streams import plan_run
from fleetbus.client.skyrl import FleetbusEnv
from fleetbus_schemas import Subjects
from tests.support.servers import connect, run_server

RUN = "skyrl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with one environment worker that plays three turns."""
    with start_blocking_portal("asyncio") as portal:
        folder = tmp_path_factory.mktemp("nats")
        with portal.wrap_async_context_manager(run_server(folder, monitor_port=None)) as running:
            portal.call(declare, running.url)
            command = ["environment", "--environment", "scripted:3", "--nats", running.url, "--run", RUN]
            worker = subprocess.Popen([sys.executable, "-m", "fleetbus_workers.cli", *command])
            try:
                portal.call(wait_for_worker, running.url)
                yield running.url
            finally:
                worker.kill()
                worker.wait(10)


async def declare(url: str) -> None:
    async with connect(url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))


async def wait_for_worker(url: str) -> None:
    with anyio.fail_after(30):
        async with connect(url, run=RUN) as bus, bus.read([Subjects(RUN).life("*", "*")]) as reader:
            await reader.receive()


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.json"
    tasks = [{"key": f"t{number}", "prompt": f"Task {number}.", "env_key": "scripted"} for number in range(4)]
    file.write_text(json.dumps(tasks))
    return file


@pytest.fixture
def register_environment() -> Iterator[None]:
    skyrl_gym.register(id="fleetbus", entry_point="fleetbus.client.skyrl:FleetbusEnv")
    yield
    deregister("fleetbus")


def build_environment(server: str, tasks_file: Path, **extras: Any) -> Any:
    config = {"nats_url": server, "run": RUN, "tasks_file": str(tasks_file)}
    return skyrl_gym.make("fleetbus", env_config=config, extras={"task_key": "t1", **extras})


@pytest.mark.integration
@pytest.mark.usefixtures("register_environment")
def test_an_episode_has_the_fields_and_types_of_skyrl_gym(server: str, tasks_file: Path) -> None:
    environment = build_environment(server, tasks_file)
    messages, metadata = environment.init([{"role": "user", "content": "ignored"}])
    assert messages == [{"role": "user", "content": "Task 1."}]
    assert metadata == {"task_key": "t1", "env_key": "scripted", "tools": [], "modality": "tool_use"}
    first, second, third = (environment.step(f"action {turn}") for turn in range(3))
    assert (first["observations"], first["reward"], first["done"]) == ([{"role": "user", "content": "turn 1"}], 0.0, False)
    assert second["metadata"]["turn"] == 2
    assert (third["reward"], third["done"], third["metadata"]["done_reason"]) == (1.0, True, "agent_done")
    environment.close()
    environment.close()
    assert environment.get_metrics() == {
        "task_key": "t1", "env_key": "scripted", "turns": 3, "tool_calls": 0, "tool_errors": 0, "final_reward": 1.0
    }  # fmt: skip


@pytest.mark.usefixtures("register_environment")
def test_when_the_turns_are_used_up_the_verdict_still_comes_with_the_reward(server: str, tasks_file: Path) -> None:
    environment = build_environment(server, tasks_file, max_turns=2)
    environment.init([])
    environment.step("one")
    last = environment.step("two")
    assert (last["observations"], last["done"], last["reward"]) == ([], True, 1.0)
    assert last["metadata"]["done_reason"] == "max_turns"
    environment.close()


@pytest.mark.usefixtures("register_environment")
def test_a_generator_s_loop_runs_a_hundred_episodes_in_threads(server: str, tasks_file: Path) -> None:
    def episode(number: int) -> dict[str, Any]:
        environment = build_environment(server, tasks_file, task_key=f"t{number % 4}")
        try:
            environment.init([])
            rewards, done = [], False
            while not done:
                output = environment.step("go on")
                rewards.append(output["reward"])
                done = output["done"]
            assert rewards == [0.0, 0.0, 1.0]
            return dict(environment.get_metrics())
        finally:
            environment.close()

    with ThreadPoolExecutor(32) as threads:
        metrics = list(threads.map(episode, range(100)))
    metrics_by_name = FleetbusEnv.aggregate_metrics(metrics)
    assert (metrics_by_name["total_episodes"], metrics_by_name["avg_turns"], metrics_by_name["scripted/num_episodes"]) == (
        100,
        3.0,
        100,
    )


async def test_the_coroutines_do_the_same_on_a_loop_of_the_caller_s(server: str, tasks_file: Path) -> None:
    config = {"nats_url": server, "run": RUN, "tasks_file": str(tasks_file)}
    environment = FleetbusEnv(config, {"task_key": "t2"})
    messages, _ = await environment.init_async([])
    assert messages[0]["content"] == "Task 2."
    assert (await environment.step_async("x"))["done"] is False
    await environment.close_async()


@pytest.mark.parametrize(
    ("config", "extras", "error", "words"),
    [
        ({}, {}, ValueError, "task_key must be provided"),
        ({}, {"task_key": "t"}, ValueError, "tasks_file must be provided"),
        ({"tasks_file": "/nowhere.json"}, {"task_key": "t"}, FileNotFoundError, "Tasks file not found"),
    ],
)
def test_a_wrong_configuration_is_named_when_the_environment_is_made(
    config: dict[str, Any], extras: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        FleetbusEnv(config, extras)


def test_an_unknown_task_is_named_beside_those_that_exist(tasks_file: Path) -> None:
    with pytest.raises(ValueError, match=r"Task 'x' not found in .*t0"):
        FleetbusEnv({"tasks_file": str(tasks_file)}, {"task_key": "x"})
