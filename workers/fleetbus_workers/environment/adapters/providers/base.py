"""What starts the server of an environment: the protocol, its labels, and how long one waits for an answer.

Above it is an environment (`provided`); below it one provider per outside system. Whatever a provider starts carries labels
that say whose it is and until when it may live, so that a sweep finds what a crash left behind.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from typing import Protocol

import anyio
import httpx
import msgspec

from fleetbus_workers.environment.base import EnvironmentFailed

PREFIX = "fleetbus"
POLL_SECONDS = 0.1
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Whose something is: ``owner`` is this process (see `owner_of_this_process`), ``expires`` Unix seconds."""

    run: str
    episode: str
    owner: str
    expires: int

    def to_mapping(self) -> dict[str, str]:
        """As a container carries them; every value is one that all systems accept."""
        values = {"run": self.run, "episode": self.episode, "owner": self.owner, "expires": str(self.expires)}
        return {f"{PREFIX}.{name}": sanitize_label(value) for name, value in values.items()}


class ProvidedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started: what its provider calls it, and where it answers."""

    name: str
    url: str


class Provider(Protocol):
    """Starts and stops servers. Everything raises `EnvironmentFailed` when the outside system does not do what it should."""

    async def start(self, labels: Labels) -> ProvidedServer:
        """Start a server; cancelled or failed, it leaves nothing running."""

    async def find_problem(self, server: ProvidedServer) -> str:
        """Why the server will never answer; empty while it may."""

    async def stop(self, server: ProvidedServer) -> None:
        """Stop the server and remove all of it; nothing is wrong if it is gone already."""

    async def sweep(self) -> list[str]:
        """Remove what a crash left; the names of what was removed."""

    async def close(self) -> None:
        """Release the connection to the outside system."""


async def wait_until_ready(provider: Provider, server: ProvidedServer, *, path: str, seconds: float) -> None:
    """Return once the server answers ``path`` with less than 500. Raises `EnvironmentFailed` when it ends or time is up."""
    last_answer = "nothing answers"
    try:
        with anyio.fail_after(seconds):
            async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
                while True:
                    try:
                        async with client.stream("GET", server.url + path) as answer:
                            status = answer.status_code  # the body may have no end
                        if status < 500:
                            return
                        last_answer = f"status {status}"
                    except httpx.TransportError as error:
                        last_answer = str(error) or type(error).__name__
                    reason = await provider.find_problem(server)
                    if reason:
                        raise EnvironmentFailed(f"{server.name} ended before it was ready: {reason}")
                    await anyio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise EnvironmentFailed(f"{server.name} was not ready within {seconds:g} s ({last_answer})") from None


def generate_server_name() -> str:
    """A name that no other server has."""
    return f"{PREFIX}-{secrets.token_hex(6)}"


def sanitize_label(value: str) -> str:
    """The value, reduced to the characters and length that labels permit."""
    if not value or _LABEL.fullmatch(value):
        return value
    return re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63].strip("._-")


def build_process_owner() -> str:
    """This host and process; with its time of start, because process ids come again."""
    return f"{sanitize_label(socket.gethostname())[:24]}_{os.getpid()}_{_read_start_time(os.getpid())}"


def is_abandoned(owner: str, expires: str, *, now: float | None = None) -> bool:
    """Whether a server with these labels is unused: it has expired, or its process on this host has exited."""
    if expires.isdecimal() and int(expires) < (time.time() if now is None else now):
        return True
    host, _, rest = owner.rpartition("_")[0].rpartition("_")
    started = owner.rpartition("_")[2]
    if not host or not rest.isdecimal() or host != sanitize_label(socket.gethostname())[:24]:
        return False
    return _read_start_time(int(rest)) != started


def _read_start_time(process: int) -> str:
    """When a process of this machine started, in ticks since the machine did; ``0`` where there is none, or no telling."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        if os.path.isdir("/proc/self"):
            return "0"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass
    return "0"
