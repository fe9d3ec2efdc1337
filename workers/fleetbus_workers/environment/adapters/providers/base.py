"""Starts the server of an environment: the protocol, its labels, and how long one waits for an answer.

Above it is `ProvisionedEnvironment`; below it one provider per outside system. All that a provider starts carries labels
that say whose it is and until when it may live, so that a sweep finds what a crash left behind.
"""

import secrets
from typing import Protocol

import anyio
import httpx
import msgspec

from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.ownership import PREFIX, Labels

POLL_SECONDS = 0.1


class ProvidedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started: what its provider calls it, and where it answers."""

    name: str
    url: str


class Provider(Protocol):
    """Starts and stops servers. Everything raises `EnvironmentFailed` when the outside system does not do what it should."""

    async def start(self, labels: Labels) -> ProvidedServer:
        """Start a server; cancelled or failed, it leaves nothing running."""

    async def find_problem(self, server: ProvidedServer) -> str:
        """The reason why the server will never answer; empty while it may."""

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
