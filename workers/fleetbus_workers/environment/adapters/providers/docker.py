"""Servers as containers of a Docker engine. Blocking calls of docker-py run in threads and are waited for when cancelled."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.providers.base import ProvidedServer, generate_server_name
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.environment.ownership import PREFIX, Labels, is_abandoned

CALL_SECONDS = 60
CALLS_AT_A_TIME = 16
MAX_PROCESSES = 512


class DockerEngine:
    """A Docker engine: calls of docker-py in threads, and what goes wrong with them as `EnvironmentFailed`.

    ``seconds``: how long it may be silent.
    """

    def __init__(self, *, seconds: float = CALL_SECONDS) -> None:
        self._seconds = seconds
        self._client: Any = None
        self._limiter = anyio.CapacityLimiter(CALLS_AT_A_TIME)

    async def call(self, what: str, function: Callable[[Any], Any]) -> Any:
        """Call ``function`` with the client; ``what`` names in an error what the engine did not do."""
        return await anyio.to_thread.run_sync(self._run_in_thread, what, function, limiter=self._limiter)

    async def remove(self, name: str) -> None:
        """Remove a container; nothing is wrong if it is gone already."""
        with anyio.CancelScope(shield=True):  # docker-py has a time limit of its own
            await self.call("remove", partial(_remove, name=name))

    async def sweep(self) -> list[str]:
        """Remove containers of workers that have exited, and expired ones of any worker."""
        containers = await self.call(
            "list", lambda client: client.containers.list(all=True, filters={"label": f"{PREFIX}.owner"}, ignore_removed=True)
        )
        removed = []
        for container in containers:
            labels = container.labels
            if is_abandoned(labels.get(f"{PREFIX}.owner", ""), labels.get(f"{PREFIX}.expires", "")):
                await self.call("remove", partial(_remove, name=container.name))
                removed.append(str(container.name))
        return removed

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await anyio.to_thread.run_sync(client.close)

    def _run_in_thread(self, what: str, function: Callable[[Any], object]) -> Any:
        import docker
        import requests

        try:
            if self._client is None:
                self._client = docker.from_env(timeout=self._seconds)
            return function(self._client)
        except docker.errors.ImageNotFound as error:
            image = str(error.explanation or "").rpartition(": ")[2] or "the image"
            raise EnvironmentFailed(f"there is no image {image}: docker pull {image}") from error
        except (docker.errors.DockerException, requests.RequestException) as error:
            reason = clean_error(str(getattr(error, "explanation", None) or error).partition("\n")[0])[:300]
            raise EnvironmentFailed(f"the Docker engine did not {what}: {reason}") from error


class DockerProvider:
    """Runs ``image`` once per episode, its ``port`` published on this machine's loopback alone."""

    def __init__(
        self,
        image: str,
        *,
        port: int,
        command: Sequence[str] = (),
        memory_bytes: int = 2 << 30,
        cpus: float = 1.0,
    ) -> None:
        self._image = image
        self._port = port
        self._command = list(command)
        self._memory_bytes = memory_bytes
        self._cpus = cpus
        self._engine = DockerEngine()

    async def start(self, labels: Labels) -> ProvidedServer:
        name = generate_server_name()
        options = {
            "name": name,
            "command": self._command or None,
            "labels": labels.to_mapping(),
            "detach": True,
            "init": True,
            "ports": {f"{self._port}/tcp": ("127.0.0.1", None)},
            "mem_limit": self._memory_bytes,
            "memswap_limit": self._memory_bytes,
            "nano_cpus": int(self._cpus * 1e9),
            "pids_limit": MAX_PROCESSES,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
        }
        async with self._remove_on_failure(name):
            await self._engine.call("start", lambda client: client.containers.run(self._image, **options))
            container = await self._engine.call("inspect", lambda client: client.containers.get(name))
            published = (container.attrs["NetworkSettings"]["Ports"] or {}).get(f"{self._port}/tcp")
            if not published:
                raise EnvironmentFailed(f"{name} ended at once: {await self._describe_exit(container)}")
        return ProvidedServer(name=name, url=f"http://127.0.0.1:{published[0]['HostPort']}")

    async def find_problem(self, server: ProvidedServer) -> str:
        container = await self._engine.call("inspect", lambda client: client.containers.get(server.name))
        return "" if container.status in ("created", "running", "restarting") else await self._describe_exit(container)

    async def stop(self, server: ProvidedServer) -> None:
        await self._engine.remove(server.name)

    async def sweep(self) -> list[str]:
        return await self._engine.sweep()

    async def close(self) -> None:
        await self._engine.close()

    @asynccontextmanager
    async def _remove_on_failure(self, name: str) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self._engine.remove(name)
            raise

    async def _describe_exit(self, container: Any) -> str:
        logs = await self._engine.call("logs", lambda _: container.logs(tail=1))
        code = container.attrs.get("State", {}).get("ExitCode")
        return f"exit code {code}: {clean_error(logs.decode(errors='replace').strip())[:300]}"


def _remove(client: Any, name: str) -> None:
    import docker

    try:
        client.containers.get(name).remove(force=True, v=True)
    except docker.errors.NotFound:
        pass
    except docker.errors.APIError as error:
        if error.status_code != 409:  # somebody else is removing it already
            raise


def check_docker_installed() -> None:
    """Raise `UserError` without docker-py."""
    import importlib.util

    if importlib.util.find_spec("docker") is None:
        raise UserError("containers need docker-py: pip install 'fleetbus[docker]'")
