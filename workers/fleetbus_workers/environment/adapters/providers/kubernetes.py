"""Servers as Kubernetes Jobs: one pod per episode, reached by its own address, so the worker has to run in the cluster.

The Job is the safety net: it ends by itself when the episode's time is up, and the cluster removes it then.
"""

import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import anyio

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.providers.base import ProvidedServer, generate_server_name
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.ownership import PREFIX, Labels, is_abandoned

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
RETENTION_SECONDS = 60
"""How long the cluster keeps a Job that has ended."""

T = TypeVar("T")


def build_job_manifest(
    name: str,
    labels: Labels,
    *,
    image: str,
    port: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    memory_bytes: int,
    cpus: float,
    seconds: int,
) -> dict[str, Any]:
    """The Job of one episode: no retries, no service account, no rights, and an end after ``seconds``."""
    limits = {"memory": str(memory_bytes), "cpu": f"{round(cpus * 1000)}m"}
    container: dict[str, object] = {
        "name": "environment",
        "image": image,
        "ports": [{"containerPort": port}],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if command:
        container["args"] = list(command)
    labels_of_job = {key.replace(".", "/"): value for key, value in labels.to_mapping().items()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels_of_job},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": seconds,
            "ttlSecondsAfterFinished": RETENTION_SECONDS,
            "template": {
                "metadata": {"labels": labels_of_job},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "containers": [container],
                },
            },
        },
    }


class KubernetesProvider:
    """Runs ``image`` as a Job per episode in ``namespace``; the cluster is that of the pod or of ``KUBECONFIG``."""

    def __init__(
        self,
        image: str,
        *,
        port: int,
        namespace: str = "default",
        command: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        memory_bytes: int = 2 << 30,
        cpus: float = 1.0,
    ) -> None:
        self._image = image
        self._port = port
        self._namespace = namespace
        self._command = command
        self._variables = variables or {}
        self._memory_bytes = memory_bytes
        self._cpus = cpus
        self._connected: Any = None

    async def start(self, labels: Labels) -> ProvidedServer:
        """Create the Job and wait for the address of its pod, until the labels expire at the latest."""
        from lightkube.resources.batch_v1 import Job

        name = generate_server_name()
        manifest = build_job_manifest(
            name,
            labels,
            image=self._image,
            port=self._port,
            command=self._command,
            variables=self._variables,
            memory_bytes=self._memory_bytes,
            cpus=self._cpus,
            seconds=max(1, labels.expires - int(time.time())),
        )
        try:
            await _request("create a Job", self._open_client().create(Job.from_dict(manifest), namespace=self._namespace))
            address = await self._wait_for_address(name)
        except BaseException:
            await self.stop(ProvidedServer(name=name, url=""))
            raise
        return ProvidedServer(name=name, url=f"http://{f'[{address}]' if ':' in address else address}:{self._port}")

    async def _wait_for_address(self, name: str) -> str:
        while True:
            pod = await self._find_pod(name)
            if pod is not None and pod.status is not None:
                if pod.status.phase in ("Failed", "Succeeded"):
                    raise EnvironmentFailed(f"{name} ended at once: {_describe_failure(pod)}")
                if pod.status.podIP:
                    return str(pod.status.podIP)
            await anyio.sleep(POLL_SECONDS)

    async def _find_pod(self, name: str) -> Any:
        from lightkube.resources.core_v1 import Pod

        listing = self._open_client().list(Pod, namespace=self._namespace, labels={"batch.kubernetes.io/job-name": name})
        return await _request("list pods", _get_first(listing))

    async def find_problem(self, server: ProvidedServer) -> str:
        pod = await self._find_pod(server.name)
        if pod is None:
            return "its pod is gone"
        return _describe_failure(pod) if pod.status is not None and pod.status.phase in ("Failed", "Succeeded") else ""

    async def stop(self, server: ProvidedServer) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_SECONDS):
            await self._delete(server.name)

    async def _delete(self, name: str) -> None:
        from lightkube.core.exceptions import ApiError
        from lightkube.resources.batch_v1 import Job
        from lightkube.types import CascadeType

        async def delete() -> None:
            try:
                await self._open_client().delete(
                    Job, name, namespace=self._namespace, cascade=CascadeType.BACKGROUND, grace_period=0
                )
            except ApiError as error:
                if error.status.code != 404:
                    raise

        await _request("delete a Job", delete())

    async def sweep(self) -> list[str]:
        """Delete Jobs of this host's dead workers, and those whose time is up."""
        from lightkube.resources.batch_v1 import Job

        async def list_jobs() -> list[Any]:
            jobs = self._open_client().list(Job, namespace=self._namespace, labels={f"{PREFIX}/owner": None})
            return [job async for job in jobs]

        removed = []
        for job in await _request("list Jobs", list_jobs()):
            labels_of_job = job.metadata.labels or {}
            if is_abandoned(labels_of_job.get(f"{PREFIX}/owner", ""), labels_of_job.get(f"{PREFIX}/expires", "")):
                await self._delete(job.metadata.name)
                removed.append(str(job.metadata.name))
        return removed

    async def close(self) -> None:
        client, self._connected = self._connected, None
        if client is not None:
            await client.aclose()

    def _open_client(self) -> Any:
        if self._connected is None:
            from lightkube import AsyncClient
            from lightkube.config.kubeconfig import KubeConfig
            from lightkube.core.exceptions import ConfigError

            try:
                self._connected = AsyncClient(config=KubeConfig.from_env(), namespace=self._namespace)
            except ConfigError as error:
                raise EnvironmentFailed(f"no cluster: {error}; run inside one, or set KUBECONFIG") from error
        return self._connected


async def _get_first(listing: Any) -> object:
    async for item in listing:
        return item
    return None


async def _request(what: str, request: Awaitable[T]) -> T:
    import httpx2
    from lightkube.core.exceptions import ApiError, LoadResourceError

    try:
        return await request
    except ApiError as error:
        raise EnvironmentFailed(f"the cluster did not {what}: {error.status.message}") from error
    except LoadResourceError as error:
        raise EnvironmentFailed(f"the cluster did not {what}: {error}") from error
    except (OSError, httpx2.HTTPError) as error:
        raise EnvironmentFailed(f"the cluster did not {what}: {str(error) or type(error).__name__}") from error


def _describe_failure(pod: Any) -> str:
    states = [status.state for status in (pod.status.containerStatuses or []) if status.state is not None]
    ended = next((state.terminated for state in states if state.terminated is not None), None)
    if ended is None:
        return str(pod.status.reason or pod.status.phase)
    return f"exit code {ended.exitCode} ({ended.reason})"


def check_kubernetes_installed() -> None:
    """Raise `UserError` without lightkube."""
    import importlib.util

    if importlib.util.find_spec("lightkube") is None:
        raise UserError("Kubernetes needs lightkube: pip install 'fleetbus[kubernetes]'")
