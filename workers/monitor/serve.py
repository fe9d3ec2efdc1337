"""Serves the page on one socket until it is told to stop; the socket is bound before anything is said about it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import uvicorn

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from schemas import Subjects
from workers.cli.model import model_folder
from workers.monitor.app import Site
from workers.monitor.follow import Watch
from workers.monitor.state import FleetState
from workers.monitor.words import load_words

STOP_SECONDS = 3


class _Server(uvicorn.Server):
    """Signals are the caller's: he decides when ``should_exit``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises `UserError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UserError(f"{host}:{port} cannot be used ({error.strerror}): choose another with --port, or 0 for any") from error
    return bound


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve(
    bus: Bus, configuration: Configuration, *, host: str, bound: socket.socket, stop: anyio.Event, told: Callable[[str], None]
) -> None:
    """Watch the run and serve its page on ``bound`` until ``stop`` is set. ``told`` gets the address once it answers."""
    subjects = Subjects(configuration.run.name)
    watch = Watch(bus, subjects, FleetState(configuration.learner.steps))
    words = await anyio.to_thread.run_sync(load_words, model_folder(configuration.run))
    hosts = ["localhost", "127.0.0.1", "[::1]"] if is_loopback(host) else None
    site = Site(watch, subjects, words, hosts=hosts)
    settings = uvicorn.Config(
        site.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_SECONDS, ws="none"
    )
    server = _Server(settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)

        async def until_told() -> None:
            await stop.wait()
            site.stopping.set()
            server.should_exit = True

        tasks.start_soon(until_told)
        told(f"http://{_shown_host(host)}:{bound.getsockname()[1]}/")
        try:
            await server.serve(sockets=[bound])
        finally:
            site.stopping.set()
            server.should_exit = True
        tasks.cancel_scope.cancel()


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def page_files() -> list[Path]:
    """The files of the page, for whoever wants to check that they came along."""
    return sorted((Path(__file__).parent / "page").iterdir())
