"""Workers that may open a connection to one port and nothing else: they play a run through a WebSocket of its server.

An environment worker and an inference worker in a network namespace whose firewall lets TCP out to that port of the server,
answers in, and nothing else: no names, no other port, no loopback. The learner is where the log is.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.streams import plan_run
from tests.support.ports import free_ports
from tests.support.servers import RunningServers, running_servers
from tests.support.sites import Site, has_namespaces, shuts_out
from tests.system.test_sites import RUN, Results, S, role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORKERS = ("environment-1", "inference-1")
DOWN_SECONDS = 5.0
CUT_SECONDS = 12.0

needs_firewall = pytest.mark.skipif(
    not (has_namespaces() and shuts_out()), reason="needs root, network namespaces and iptables on Linux"
)


@asynccontextmanager
async def shut_in(folder: Path) -> AsyncIterator[tuple[RunningServers, Site, int]]:
    """A run that is declared, a place that reaches one port of its server alone, and that port."""
    plan, (port,) = plan_run(RUN, lanes=4, max_bytes=1 << 28), free_ports(1)
    site = Site(folder, 1, namespace=True)
    async with site.linked():
        hosts, listening = ["127.0.0.1", site.address], [f"{site.address}:{port}"]
        async with running_servers(folder, [plan], form="keyed", hosts=hosts, websockets=listening) as servers:
            await servers.declare(plan)
            site.shut_in(port)
            yield servers, site, port


def connects(site: Site, host: str, port: int) -> bool:
    """True if a program there gets a connection."""
    bash = site.command("timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}")
    return subprocess.run(bash, capture_output=True, check=False).returncode == 0


@needs_firewall
async def test_a_run_trains_through_one_port_beside_kills_a_cut_of_the_link_and_a_restart_of_its_server(tmp_path: Path) -> None:
    results, begun = Results(), time.monotonic()
    async with shut_in(tmp_path) as (servers, site, port), servers.connect(RUN, "monitor-1") as bus, AsyncExitStack() as stack:
        assert servers.auth is not None
        plain = int(servers.url.rpartition(":")[2])
        for host, other in ((site.address, port + 1), (site.address, plain), ("127.0.0.1", plain)):
            assert not await anyio.to_thread.run_sync(connects, site, host, other), "the firewall lets something else out"
        assert await anyio.to_thread.run_sync(connects, site, site.address, port)
        url, keys = f"wss://{site.address}:{port}", servers.auth.path
        running = {
            name: await stack.enter_async_context(role(name, url, keys, tmp_path, before=site.command())) for name in WORKERS
        }
        learner = await stack.enter_async_context(role("learner", servers.url, keys, tmp_path))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(results.follow, bus)
            for killed in WORKERS:
                await results.until(len(results.finished) + 8, "environment-1")
                running[killed].kill()
                await running[killed].wait()
                running[killed] = await stack.enter_async_context(role(killed, url, keys, tmp_path, before=site.command()))
            await results.until(len(results.finished) + 8, "environment-1")
            await site.cut()
            await anyio.sleep(CUT_SECONDS)
            await site.mend()
            mended = anyio.current_time()
            await results.until(1, "environment-1", mended)
            back = anyio.current_time() - mended
            await results.until(len(results.finished) + 8, "environment-1")
            await servers.processes[0].kill()
            await anyio.sleep(DOWN_SECONDS)
            await servers.processes[0].restart()
            with anyio.fail_after(150):
                await results.ended.wait()
            tasks.cancel_scope.cancel()
        assert [running[name].returncode for name in WORKERS] == [None, None], "a worker ended"
        report, refused = await audit_run(bus, S), await servers.violations()
        with anyio.fail_after(30):
            assert await learner.wait() == 0
    played = f"{results.steps} steps, {len(results.finished)} episodes"
    print(f"{time.monotonic() - begun:.0f} s: {played}, back {back:.1f} s after the cut")
    assert report.balanced, report.findings
    assert refused == []
    assert {outcome for _, _, outcome in results.finished} <= {"completed", "cancelled", "stale"}
