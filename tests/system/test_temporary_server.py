"""Commands that serve a stopped run from its files: nothing of that outlives them, however they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects, WorkerStopped, encode
from fleetbus_workers.up.lock import lock_run
from tests.support.processes import until, wait_for_output

pytestmark = pytest.mark.integration

RUN = "stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
async def test_the_server_of_a_command_that_is_killed_ends_with_it(sent: signal.Signals, tmp_path: Path) -> None:
    store = tmp_path / ".fleetbus" / "runs" / RUN / "nats"
    async with run_server(store) as server, connect(server.url, run=RUN, role="test") as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))

    command = [sys.executable, "-m", "fleetbus_workers.cli", "top", RUN, "--json"]
    async with await anyio.open_process(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as top:
        await wait_for_output(top.stdout, b'"run":"stopped"')
        own = psutil.Process(int((store / "owner").read_text().split()[1]))
        top.send_signal(sent)
        await top.wait()
    await until(lambda: has_ended(own))


async def test_a_run_whose_up_was_killed_is_served_from_its_files(tmp_path: Path) -> None:
    folder = tmp_path / ".fleetbus" / "runs" / RUN
    async with run_server(folder / "nats") as server, connect(server.url, run=RUN, role="test") as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
        stopped = WorkerStopped(worker="w", role="environment")
        await bus.publish(Subjects(RUN).life("environment", "w"), encode(stopped))
    (folder / "server.json").write_text(f'{{"url": "{server.url}", "pid": 1}}')
    (folder / "lock").write_text("1")

    def audit() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fleetbus_workers.cli", "audit", RUN]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)

    done = await anyio.to_thread.run_sync(audit)
    assert (done.returncode, done.stderr) == (0, "")
    with lock_run(folder / "lock", RUN):
        done = await anyio.to_thread.run_sync(audit)
    assert done.returncode == 2 and "no NATS server answers" in done.stderr, "an `up` that is there is taken at its word"


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True
