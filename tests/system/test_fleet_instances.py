"""Instances of a Fleet-compatible platform end: with their episode, their worker, or the next worker of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import FleetSettings
from fleetbus_schemas import EpisodeRequested, Subjects, encode
from fleetbus_workers.environment.adapters.fleet import host as fleet_host
from tests.support.fleet_platform.episodes import TASK, begun, environments, fleet_environments, platform, prepare, settings
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.processes import wait_for_output
from tests.support.servers import connect, run_server
from tests.support.tool_calls import call, read_step_text

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


async def test_a_cancelled_open_leaves_no_instance() -> None:
    fleet = FleetPlatform()
    fleet.faults.hold_create = anyio.Event()
    async with platform(fleet) as (_, server), environments(server) as environment:
        async with anyio.create_task_group() as group:
            group.start_soon(environment.open, TASK)
            await fleet.until(lambda: ("POST", "/v1/env/instances") in fleet.requests)
            group.cancel_scope.cancel()
        await environment.close()
        assert not fleet.instances
        fleet.faults.hold_create.set()
        await fleet.until(lambda: [made.status for made in fleet.instances.values()] == ["stopped"])


async def test_a_cancelled_close_still_deletes_the_instance() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await environment.close()
        await fleet.until(lambda: not fleet.running)


async def test_instances_that_nobody_here_knows_of_or_could_delete_end_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetPlatform()
    async with platform(fleet) as (_, server):
        async with environments(server) as unknown, environments(server) as undeletable:
            await begun(undeletable)
            fleet.faults.delete_errors = fleet_host.DELETE_TRIES
            await undeletable.close()
            fleet.faults.lose_create_answers = 1
            monkeypatch.setattr(fleet_host, "MAX_PAUSE_SECONDS", 60)
            async with anyio.create_task_group() as group:
                group.start_soon(unknown.open, TASK)
                await fleet.until(lambda: len(fleet.running) == 2)
                group.cancel_scope.cancel()
            await unknown.close()
            assert len(fleet.running) == 2
        assert not fleet.running


async def test_a_deletion_that_fails_for_a_passing_reason_is_repeated() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        fleet.faults.delete_errors = 2
        await environment.close()
        assert not fleet.running


async def test_a_worker_that_stops_in_the_middle_of_episodes_deletes_all_of_its_instances() -> None:
    async with platform() as (fleet, server):
        factory = fleet_environments(server, settings())
        with anyio.fail_after(50):
            async with factory.run():
                for _ in range(3):
                    await factory().open(TASK)
                assert len(fleet.running) == 3
        assert not fleet.running


async def test_a_worker_that_starts_sweeps_what_dead_workers_of_its_run_left_and_nothing_else() -> None:
    """A dead process is one whose number is free, or belongs to another process by now."""
    fleet = FleetPlatform()
    mine, other = fleet_host.build_run_prefix("tested"), fleet_host.build_run_prefix("another")
    left = [
        f"{mine}4194399_5",
        f"{mine}1_999999999999_ab12cd",
        f"{other}4194399_5",
        fleet_host.build_run_prefix("tested") + "x",
        "foreign",
    ]
    async with platform(fleet) as (_, server), environments(server) as environment:
        for number, label in enumerate((*left, fleet_host.build_run_prefix("tested") + fleet_host.build_process_label(1))):
            await fleet._made({"env_key": "shop", "run_id": label}, str(number))
        async with environments(server) as second:
            await fleet.until(lambda: len(fleet.running) == 4)
            await begun(second)
        await environment.close()
        assert {made.body["run_id"] for made in fleet.running} == {*left[2:], mine + fleet_host.build_process_label(1)}
        fleet.running[0].stop.set()


async def test_the_end_of_one_worker_leaves_the_instances_of_another_in_the_same_process_alone() -> None:
    async with platform() as (fleet, server), environments(server) as staying:
        await begun(staying)
        async with environments(server) as leaving:
            await begun(leaving)
            leaving._connection = None  # nobody closes it
        assert [made.status for made in fleet.instances.values()] == ["running", "stopped"]
        assert read_step_text(await staying.step(call("price", name="pen"))) == "Tool result:\n3"


def test_the_key_is_not_sent_to_instances_over_open_networks() -> None:
    host = fleet_host.FleetHost(base_url="https://x", key=KEY, run="r", settings=FleetSettings())
    assert host.build_headers("https://i.example/mcp") == {"Authorization": f"Bearer {KEY}"}
    assert host.build_headers("http://127.0.0.1:8000/mcp") == {"Authorization": f"Bearer {KEY}"}
    assert host.build_headers("http://i.example/mcp") == {}


CRASHING = """
import sys, anyio
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.specs import build_environment_factory

async def main():
    configuration = Configuration(run=RunSettings(name="tested"))
    factory = build_environment_factory("fleet:" + sys.argv[1], verifier=None, configuration=configuration)
    async with factory.run():
        await factory().open(Task(key="t", env="shop", prompt="p"))
        print("open", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_what_a_killed_worker_left_is_deleted_by_the_next_one_of_its_run() -> None:
    async with platform() as (fleet, server):
        with anyio.fail_after(50):
            async with await anyio.open_process([sys.executable, "-c", CRASHING, server.url], stderr=None) as process:
                await wait_for_output(process.stdout, b"open")
                process.kill()
                await process.wait()
        assert len(fleet.running) == 1
        async with environments(server):
            await fleet.until(lambda: not fleet.running)


async def test_a_worker_whose_supervisor_and_server_were_killed_deletes_its_instances(tmp_path: Path) -> None:
    """It would drain for a minute, and wait for a server that is gone; what is paid for ends before it does."""
    arguments = ["environment", "--supervised", "--run", "tested", "--name", "e1"]
    async with platform() as (fleet, server), run_server(tmp_path / "store", monitor_port=None) as nats:
        with anyio.fail_after(50):
            async with connect(nats.url, run="tested") as bus:
                await bus.declare(plan_run("tested", lanes=2))
                command = [sys.executable, "-m", "fleetbus_workers.cli", *arguments, "--environment", f"fleet:{server.url}"]
                process = await anyio.open_process([*command, "--nats", nats.url], stdout=None, stderr=None)
                for number in range(8):
                    await bus.publish(Subjects("tested").task("default", f"e{number}"), encode(requested(f"e{number}", bus)))
                await fleet.until(lambda: len(fleet.running) == 8)
            async with process:
                await nats.kill()
                assert process.stdin is not None
                await process.stdin.aclose()
                await process.wait()
        assert not fleet.running


def requested(episode: str, bus: Bus) -> EpisodeRequested:
    """An episode that waits for a policy which nobody serves."""
    return EpisodeRequested(
        episode_id=episode,
        group_id="g",
        sample_index=0,
        split="train",
        task=TASK,
        policy="default",
        deadline_ns=bus.now_ns() + 600 * 10**9,
    )


async def test_instances_get_heartbeats_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = settings(heartbeat_seconds=10)
    async with platform() as (fleet, server):
        factory = fleet_environments(server, configuration)
        monkeypatch.setattr(fleet_host, "HEARTBEATS_PER_INTERVAL", 1000)
        with anyio.fail_after(50):
            async with factory.run():
                environment = factory()
                await environment.open(TASK)
                assert fleet.instances["inst1"].body["heartbeat_interval"] == 10
                await fleet.until(lambda: fleet.instances["inst1"].beats >= 2)
                await environment.close()
