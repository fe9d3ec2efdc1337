"""The page of a run while `up` drives it: its address is shown at once, and nothing of it runs before somebody opens it."""

import importlib.util
import secrets
import socket
from collections.abc import Callable
from functools import partial

import anyio
import structlog

from fleetbus.config.settings import Configuration
from fleetbus.errors import FleetbusError
from fleetbus_workers.run_access.log_access import build_driver, open_other_run, open_run

HOST = "127.0.0.1"
PORT = 8450

log = structlog.get_logger()


async def serve_page(configuration: Configuration, show: Callable[[str], None], stop: anyio.Event) -> None:
    """Show the page's address and serve it from its first visit on, until ``stop`` is set. The run continues without it if
    it fails."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        show("page: not served, it needs pip install 'fleetbus[monitor]' (--no-monitor: do not serve it)")
        return
    key = secrets.token_urlsafe(16)
    with _listen() as bound:
        show(f"page: http://{HOST}:{bound.getsockname()[1]}/?key={key} (--no-monitor: do not serve it)")
        try:
            if await _is_visited(bound, stop):
                await _serve(configuration, bound, stop, key)
        except* Exception as errors:  # what is wrong with the page is no reason to end the training
            log.warning("page failed; the run continues without it", exc_info=errors)
            show(f"page stopped: {_describe(errors)}; `fleetbus monitor {configuration.run.name}` serves it")


def _listen() -> socket.socket:
    """A listening socket on loopback: on the port that `fleetbus monitor` has if it is free, else on any."""
    try:
        bound = socket.create_server((HOST, PORT))
    except OSError:
        bound = socket.create_server((HOST, 0))
    bound.setblocking(False)
    return bound


async def _is_visited(bound: socket.socket, stop: anyio.Event) -> bool:
    """Wait for a first connection, which stays in the socket's queue; False when ``stop`` was set before."""
    async with anyio.create_task_group() as tasks:

        async def wait_for_stop() -> None:
            await stop.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(wait_for_stop)
        await anyio.wait_readable(bound)
        tasks.cancel_scope.cancel()
    return not stop.is_set()


async def _serve(configuration: Configuration, bound: socket.socket, stop: anyio.Event, key: str) -> None:
    from fleetbus_workers.observe.monitor.serve import serve

    async with open_run(configuration, "monitor") as bus:
        await serve(
            bus,
            configuration,
            host=HOST,
            bound=bound,
            stop=stop,
            on_ready=lambda address: None,
            driver=build_driver(configuration),
            key=key,
            open_operator=partial(open_run, configuration, "cancel"),
            open_other=partial(open_other_run, configuration),
        )


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, FleetbusError) else f"{type(error).__name__}: {error}"
