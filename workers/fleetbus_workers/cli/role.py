"""One role as one process: connect, work, and stop as requested.

A first SIGTERM or Ctrl-C drains: finish or hand back, then exit 0. A second one stops at once. A worker that was replaced by
another exits 0 too, so that whoever keeps workers running does not start it again. A process that `fleetbus up` started also
ends when `up` is gone, however that happened: see `fleetbus_workers.up.parent_death`.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import click

from fleetbus.errors import UserError
from fleetbus_workers.cli.name_validation import validate_name
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.program import is_bad_input, is_taken_over
from fleetbus_workers.exit_status import CRASHED, FINISHED, INTERRUPTED

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.run_folder import RunFolder
    from fleetbus.config.settings import Configuration

Work = Callable[["Bus", "Configuration", str, anyio.Event], Awaitable[None]]
"""A role's loop: returns when it is finished or, once the event is set, drained."""

_EXTRAS = {"torch": "torch", "transformers": "torch", "tokenizers": "torch", "safetensors": "torch", "numpy": "torch"}
_EXTRAS |= {"mcp": "environment", "httpx": "environment", "matplotlib": "plot"}


def role_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: what every role command takes besides settings."""
    name = click.option("--name", metavar="NAME", help="Name of this worker, unique in the run (default: made up)")
    supervised = click.option("--supervised", is_flag=True, hidden=True, help="End when standard input reaches its end")
    return name(supervised(function))


def run_role(role: str, load_work: Callable[[], Work], values: dict[str, Any]) -> int:
    """Run a role until it is finished, drained or interrupted; the command's exit code. Raises `UserError`."""
    import structlog

    from fleetbus.logs import configure_logs

    configuration = load_settings(values).configuration
    name = values.get("name") or generate_worker_name(role)
    validate_name("--name", name)
    url = resolve_server_url(configuration)
    if values.get("supervised"):
        from fleetbus_workers.up.parent_death import exit_with_parent

        exit_with_parent()
    configure_logs(configuration.log, run=configuration.run.name, role=role, worker=name)
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar for weights that are read in a second is noise in a log
    work = _import_work(load_work)
    try:
        return anyio.run(_serve, role, work, configuration, name, url, backend_options={"use_uvloop": os.name != "nt"})
    except Exception as error:
        if is_bad_input(error):
            raise
        if is_taken_over(error):
            structlog.get_logger().warning("stopped for good: another worker has taken over", reason=str(error))
            return FINISHED
        structlog.get_logger().exception("crashed")
        return CRASHED


def generate_worker_name(role: str) -> str:
    """A name that no other worker of the run has or had: role, host, process id, and a random part, because a container that
    is started again has the same host and the same process id."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:64] or "host"
    return f"{role}-{host}-{os.getpid()}-{secrets.token_hex(2)}"


def resolve_server_url(configuration: Configuration) -> str:
    """The server to connect to: the one that was named, or the one that a running `up` of the same run started here."""
    from fleetbus.config.run_folder import run_folder

    if url := configuration.nats.url or find_local_server_url(run_folder(configuration.run)):
        return url
    raise UserError(
        f"no server for run {configuration.run.name}: give --nats nats://HOST:4222, or start `fleetbus up` in this folder first"
    )


def find_local_server_url(folder: RunFolder) -> str:
    """The URL of the server that a running `up` started, else empty."""
    return read_server_address(folder).get("url", "")


def read_server_address(folder: RunFolder) -> dict[str, str]:
    """Server address written by a running `up`, else empty: an `up` that was killed leaves a stale file."""
    import msgspec

    from fleetbus_workers.up.lock import is_held

    if not folder.server.is_file() or (folder.lock.is_file() and not is_held(folder.lock)):
        return {}
    try:
        told = msgspec.json.decode(folder.server.read_bytes())
    except FileNotFoundError:  # it ended just now
        return {}
    return {name: str(told.get(name, "")) for name in ("url", "monitor")}


def _import_work(load_work: Callable[[], Work]) -> Work:
    try:
        return load_work()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise UserError(f"{package} is not installed: pip install 'fleetbus[{_EXTRAS[package]}]'") from error


async def _serve(role: str, work: Work, configuration: Configuration, name: str, url: str) -> int:
    from fleetbus.auth.access import build_access
    from fleetbus.bus.nats import connect
    from fleetbus.service_api import Microservice
    from fleetbus_schemas import Subjects

    access = build_access(role, configuration.nats.auth)
    drain = anyio.Event()
    exit_code = FINISHED
    async with anyio.create_task_group() as tasks:

        async def stop_on_signals() -> None:
            nonlocal exit_code
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    if drain.is_set():
                        exit_code = INTERRUPTED
                        tasks.cancel_scope.cancel()
                        return
                    drain.set()

        tasks.start_soon(stop_on_signals)
        run = configuration.run.name
        async with connect(url, run=run, role=role, worker=name, **access) as bus, anyio.create_task_group() as services:
            await _check_declared(bus, run)
            services.start_soon(Microservice(bus, Subjects(run), role=role, worker=name).run)
            await work(bus, configuration, name, drain)
            services.cancel_scope.cancel()
        tasks.cancel_scope.cancel()
    return exit_code


async def _check_declared(bus: Bus, run: str) -> None:
    from fleetbus.bus.nats.api import STREAM_NOT_FOUND, ApiRefused

    try:
        await bus.last_sequence()
    except ApiRefused as refused:
        if refused.code != STREAM_NOT_FOUND:
            raise
        raise UserError(
            f"no run {run} on this server: `fleetbus init --run {run}` declares it; or check --run and --nats"
        ) from None
