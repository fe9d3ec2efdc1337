"""Three servers, each with its monitoring address: views read all of them as one, and go on while one is down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from fleetbus.bus.nats import connect
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import fetch_server_view
from fleetbus_workers.observe.run.nats_servers import read_nats_servers
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from tests.support.cluster import cluster, declare_streams, find_leader
from tests.support.small_deployment import RUN

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def test_views_read_a_cluster_while_one_of_its_servers_is_down(tmp_path: Path, capsys: Any) -> None:
    async with cluster(tmp_path) as servers:
        await declare_streams(servers)
        async with connect(servers.url, run=RUN, role="environment", worker="env-1") as bus:
            for number in range(3):
                await bus.publish(Subjects(RUN).task("default", f"e{number}"), b"a request")
            seen = await to_thread.run_sync(read_whole, servers.monitor_urls)
            assert not seen.problem and not seen.problems and [client.worker for client in seen.clients] == ["env-1"]
            assert next(each["num_pending"] for each in seen.consumers if each["name"] == "task_default") == 3
            assert next(stream.entries for stream in seen.streams if stream.name == f"fb_{RUN}") == 3
            leader = await find_leader(servers)
            await servers.kill(leader)
            dead = servers.monitor_urls[leader]
            with anyio.fail_after(60):
                await bus.publish(Subjects(RUN).task("default", "e3"), b"a request", timeout=50)  # there is a leader again
            where = [word for url in servers.monitor_urls for word in ("--nats-http", url)]
            capsys.readouterr()
            assert await run(["top", RUN, "--once", "--nats", servers.url, *where]) == 0
            shown = " ".join(capsys.readouterr().out.split())
            assert f"no server monitoring at {dead}: Connection refused" in shown and "slow consumers 0" in shown
            await run(["doctor", "--json", "--run", RUN, "--nats", servers.url, *where])
            findings = [(each["name"], each["state"]) for each in json.loads(capsys.readouterr().out)["findings"]]
            assert ("nats monitoring", "ok") in findings and ("nats server", "warning") in findings
            view = await fetch_server_view(bus, RUN, ",".join(servers.monitor_urls))
            samples = collect(RunView(RunState(1), LogHealth(), view, [], now=0.0, now_ns=0))
            assert [sample.value for sample in samples if sample.name == "fleetbus_nats_servers_failing"] == [1]


def read_whole(urls: list[str]) -> Any:
    return read_nats_servers(",".join(urls), RUN, consumers=True)


async def run(arguments: list[str]) -> int:
    return await to_thread.run_sync(run_program, arguments)
