"""Resources on Fleet that outlive an episode: the client, the instances, their heartbeats and their deletion.

Above it are the connections of episodes; below it the API. An instance is made and deleted in a task of the host, so that a
cancelled episode leaves none behind: the episode may end, the task continues and deletes an instance that is no longer used.

Three nets below each other: every instance is deleted when its episode closes; at the end of the worker all that carry its
label are; a worker that was killed stops their heartbeats, so the platform ends them, at the latest after their time to live,
and the next worker of the run on this machine sweeps what carries the label of a process that is no more.
"""

import os
import random
import re
import secrets
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import structlog
from anyio.abc import TaskGroup

from fleetbus.config.settings import FleetSettings
from fleetbus_workers.environment.adapters.fleet.api import (
    FleetApi,
    FleetError,
    FleetFull,
    FleetRefused,
    FleetUnavailable,
    Instance,
)
from fleetbus_workers.environment.adapters.mcp.client import ConnectionHost
from fleetbus_workers.serving.bounded_http import bound

CREATE_TRIES = 5
DELETE_TRIES = 4
MAX_PAUSE_SECONDS = 16.0
POLL_SECONDS = 1.0
HEARTBEATS_PER_INTERVAL = 3
"""Two heartbeats in a row may be lost."""

SWEEP_SECONDS = 15.0
CLEANUP_SECONDS = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")

log = structlog.get_logger(__name__)

_PROCESS = re.compile(r"(\d{1,10})_(\d{1,20})(?:_[0-9a-f]*)?\Z")


class InstanceLease:
    """One instance for one episode: it comes, or a reason why not; and it ends, whether or not it has come."""

    def __init__(self) -> None:
        self.settled, self.ended = anyio.Event(), anyio.Event()
        self.released = anyio.Event()
        self.instance: Instance | None = None
        self.error: FleetError | None = None

    async def get(self) -> Instance:
        """The instance, ready to be used; raises `FleetError`."""
        await self.settled.wait()
        if self.instance is None:
            raise self.error or FleetUnavailable("Fleet: the worker is stopping")
        return self.instance

    async def release(self) -> None:
        """Have it deleted, and wait for that if it is there; cancelled, or not yet made, it is deleted all the same."""
        self.released.set()
        if self.settled.is_set():
            await self.ended.wait()


class FleetHost:
    """Use it inside `run`."""

    def __init__(self, *, base_url: str, key: str, run: str, settings: FleetSettings) -> None:
        self.settings = settings
        self.connections = ConnectionHost()
        self.label = f"{build_run_prefix(run)}{build_process_label(os.getpid())}_{secrets.token_hex(3)}"
        self._run = run
        self._base_url = base_url
        self._key = key
        self._tasks: TaskGroup | None = None
        self._live: dict[str, Instance] = {}
        self._leases: set[InstanceLease] = set()
        self._has_leftovers = False
        """Whether an unrecorded instance may exist, or one that could not be deleted."""
        self.api: FleetApi | None = None

    def build_headers(self, url: str) -> dict[str, str]:
        """The headers for an instance's MCP endpoint; the key goes over TLS, or stays on this machine."""
        parts = urlsplit(url)
        is_private = parts.scheme == "https" or parts.hostname in LOOPBACK
        return {"Authorization": f"Bearer {self._key}"} if is_private else {}

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self._key}", "X-Fleet-SDK-Language": "Python"}
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=32)
        async with httpx.AsyncClient(
            base_url=self._base_url, headers=headers, limits=limits, event_hooks=bound(httpx)
        ) as client:
            self.api = FleetApi(client, secret=self._key)
            async with self.connections.run(), anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._sweep)
                tasks.start_soon(self._send_heartbeats)
                try:
                    yield
                finally:
                    self._tasks = None
                    tasks.cancel_scope.cancel()
                    await self._delete_all()

    def lease(self, body: dict[str, object]) -> InstanceLease:
        """An instance made after ``body`` (as ``POST /v1/env/instances`` takes it), under this worker's label."""
        if self._tasks is None:
            raise RuntimeError("enter run() of the environment factory before the first episode")
        lease = InstanceLease()
        self._tasks.start_soon(self._run_lease, lease, body)
        return lease

    async def _run_lease(self, lease: InstanceLease, body: dict[str, object]) -> None:
        """The life of one instance."""
        self._leases.add(lease)
        try:
            instance = await self._create_instance(lease, body)
            if instance is not None:
                self._live[instance.instance_id] = instance
                lease.instance = None if lease.released.is_set() else instance
                lease.settled.set()
                await lease.released.wait()
                await self._delete_instance(instance.instance_id)
            self._leases.discard(lease)
        finally:
            lease.settled.set()
            lease.ended.set()

    async def _create_instance(self, lease: InstanceLease, body: dict[str, object]) -> Instance | None:
        """Tries that fail for a passing reason are repeated under one request id, so that none makes a second instance; none
        is made for an episode that has gone."""
        body = body | {"run_id": self.label, "heartbeat_interval": int(self.settings.heartbeat_seconds)}
        request_id, failures, pauses = str(uuid.uuid4()), 0, 0
        while not lease.released.is_set():
            created_id = ""
            try:
                instance = await self._create_or_find(body, request_id)
                created_id = instance.instance_id
                return await self._wait_until_ready(instance, lease)
            except FleetFull as error:  # other episodes have to end first: this one waits as long as it may
                lease.error = error
                log.debug("fleet is at capacity; waiting", reason=str(error))
            except FleetError as error:
                lease.error = error
                failures += 1
                self._has_leftovers |= isinstance(error, FleetUnavailable)
                if created_id:
                    await self._delete_instance(created_id)
                    request_id = str(uuid.uuid4())
                if isinstance(error, FleetRefused) or failures == CREATE_TRIES:
                    return None
                log.warning("fleet instance creation failed; retrying", attempt=failures, reason=str(error))
            pauses += 1
            with anyio.move_on_after(min(2.0 ** min(pauses, 10), MAX_PAUSE_SECONDS) * random.uniform(0.5, 1)):
                await lease.released.wait()
        return None

    async def _create_or_find(self, body: dict[str, object], request_id: str) -> Instance:
        assert self.api is not None
        try:
            return await self.api.create(body, request_id=request_id)
        except FleetError as error:
            if error.status == 409 and error.instance_id:  # an earlier try was heard, its answer was not
                return await self.api.instance(error.instance_id)
            raise

    async def _wait_until_ready(self, instance: Instance, lease: InstanceLease) -> Instance:
        """Wait until it runs and is healthy. Raises `FleetUnavailable` when it has failed or its lease is released."""
        assert self.api is not None
        while not instance.is_ready:
            if instance.status in ("error", "stopped"):
                raise FleetUnavailable(f"Fleet: instance {instance.instance_id} is in state {instance.status}")
            if lease.released.is_set():
                raise FleetUnavailable(f"Fleet: instance {instance.instance_id} was not ready in time")
            with anyio.move_on_after(POLL_SECONDS):
                await lease.released.wait()
            instance = await self.api.instance(instance.instance_id)
        return instance

    async def _delete_instance(self, instance_id: str) -> None:
        """Delete it; what cannot be deleted is left to its time to live, with a warning."""
        assert self.api is not None
        self._live.pop(instance_id, None)
        for attempt in range(DELETE_TRIES):
            try:
                await self.api.delete(instance_id)
                return
            except FleetError as error:
                if isinstance(error, FleetRefused) or attempt + 1 == DELETE_TRIES:
                    self._has_leftovers = True
                    log.warning(
                        "fleet instance deletion failed; leaving it to its time to live",
                        instance=instance_id,
                        reason=str(error),
                    )
                    return
            await anyio.sleep(min(0.5 * 2**attempt, MAX_PAUSE_SECONDS))

    async def _delete_all(self) -> None:
        """Delete all instances with this worker's label, also those still being created."""
        assert self.api is not None
        if not self._leases and not self._has_leftovers:
            return
        with anyio.move_on_after(CLEANUP_SECONDS, shield=True):
            try:
                await self.api.delete_run(self.label)
            except FleetError as error:
                log.warning("fleet cleanup failed; instances end at their time to live", label=self.label, reason=str(error))

    async def _send_heartbeats(self) -> None:
        assert self.api is not None
        while True:
            await anyio.sleep(self.settings.heartbeat_seconds / HEARTBEATS_PER_INTERVAL)
            async with anyio.create_task_group() as group:
                for instance in list(self._live.values()):
                    group.start_soon(self._send_heartbeat, instance)

    async def _send_heartbeat(self, instance: Instance) -> None:
        assert self.api is not None
        try:
            await self.api.heartbeat(instance)
        except FleetError as error:
            log.warning(
                "fleet heartbeat failed; retrying at the next interval", instance=instance.instance_id, reason=str(error)
            )

    async def _sweep(self) -> None:
        """Delete what workers of this run that are no more have left on the platform."""
        assert self.api is not None
        with anyio.move_on_after(SWEEP_SECONDS):
            try:
                for label, running in await self.api.runs():
                    if running and is_orphaned(label, self._run):
                        count = await self.api.delete_run(label)
                        log.warning("orphaned fleet instances deleted", label=label, instances=count)
            except FleetError as error:
                log.warning("fleet orphan sweep failed; continuing", reason=str(error))


def build_run_prefix(run: str) -> str:
    """The prefix of the labels of a run's instances; the machine's name follows."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())
    return f"fleetbus_{run}_{host}_"


def build_process_label(process: int) -> str:
    """A process by number and start: numbers are used again."""
    return f"{process}_{_read_start_time(process)}"


def is_orphaned(label: str, run: str) -> bool:
    """True if ``label`` belongs to a process of that run on this machine that has ended. False if that is unknown."""
    prefix = build_run_prefix(run)
    found = _PROCESS.match(label.removeprefix(prefix)) if label.startswith(prefix) else None
    return found is not None and int(found[2]) > 0 and _read_start_time(int(found[1])) != int(found[2])


def _read_start_time(process: int) -> int:
    """The start time of a process (clock ticks since boot, Linux); 0 if there is none or the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19])
