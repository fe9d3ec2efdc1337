"""The run's own nats-server, held by a process of its own: ``python -m fleetbus_workers.up.server STORE PORT FILE [SYNC
[CONFIG]]``.

It starts the server again when that dies, or when its disk was full and is not any more, writes the address to FILE, and stops
it on a signal or when `up` is gone. `up` cannot own the server itself: killed with SIGKILL, it would leave an orphan.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import anyio
import msgspec

from fleetbus.auth.local_key import write_local_config
from fleetbus.bus.nats.server import STOP_LIMIT_SECONDS, SYNC_SECONDS, NatsServerProcess, run_server
from fleetbus.errors import UserError
from fleetbus.files import replace_file
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, REFUSED
from fleetbus_workers.up.address import Address
from fleetbus_workers.up.parent_death import exit_with_parent
from fleetbus_workers.up.restarts import RestartBudget

DISK_CHECK_SECONDS = 5.0
RESTART_PAUSE_SECONDS = 60.0
FULL = b"no space left on device"
ROOM_BYTES = 64 << 20
READ_BYTES = 1 << 20


async def hold_server(
    store: Path, port: int, file: Path, sync_seconds: float = SYNC_SECONDS, config: Path | None = None
) -> int:
    """Run a server until SIGTERM; the exit status. Without a configuration it has a key of its own, in ``store``."""
    status, config = FINISHED, config or write_local_config(store)
    async with (
        run_server(store, port=port, config=config, sync_seconds=sync_seconds) as server,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(_cancel_on_signal, tasks.cancel_scope)
        tasks.start_soon(_restart_after_full_disk, server)
        status = await _keep_running(server, file)
        tasks.cancel_scope.cancel()
    return status


async def end_stray_server(store: Path) -> None:
    """Stop a server whose holder was killed before it could; does nothing if there is none."""
    if (store / "owner").exists():
        binary = Path("nats-server")  # not started again, so any name will do
        await NatsServerProcess(binary, store, "127.0.0.1", 0, None, None).end_orphan()


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


async def _restart_after_full_disk(server: NatsServerProcess) -> None:
    """For ever: a server that found its disk full answers no publish any more, not even when there is room again; started
    again then, it does."""
    position = server.log_file.stat().st_size
    while True:
        await anyio.sleep(DISK_CHECK_SECONDS)
        position, text = _read_new_output(server.log_file, position)
        if FULL not in text:
            continue
        if shutil.disk_usage(server.store).free < ROOM_BYTES:
            print("disk of nats-server is full; waiting for free space", flush=True)  # noqa: T201
            continue
        print("disk space is available again; restarting nats-server", flush=True)  # noqa: T201
        server.terminate()
        await anyio.sleep(RESTART_PAUSE_SECONDS)


def _read_new_output(file: Path, position: int) -> tuple[int, bytes]:
    """Read what was written to a file since, and where it ends now."""
    with file.open("rb") as log:
        log.seek(position)
        text = log.read(READ_BYTES)
        return log.seek(0, os.SEEK_END), text


async def _keep_running(server: NatsServerProcess, file: Path) -> int:
    budget = RestartBudget()
    while True:
        _write_address(file, Address(url=server.url, pid=server.pid, monitor=server.monitor_url or ""))
        status = await server.wait()
        delay = budget.delay_after_crash(anyio.current_time())
        print(f"nats-server ended with status {status}", flush=True)  # noqa: T201
        if delay is None:
            return CRASHED
        await anyio.sleep(delay)
        await server.restart()


def _write_address(file: Path, address: Address) -> None:
    replace_file(file, msgspec.json.encode(address))


def _main(store: str, port: str, file: str, sync: str = str(SYNC_SECONDS), config: str = "") -> int:
    exit_with_parent(seconds_to_drain=0, exit_timeout_seconds=STOP_LIMIT_SECONDS + 2)
    try:
        arguments = (Path(store), int(port), Path(file), float(sync), Path(config) if config else None)
        return run_async(hold_server, *arguments)
    except UserError as error:
        print(f"fleetbus: {error}", file=sys.stderr)  # noqa: T201
        return REFUSED


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
