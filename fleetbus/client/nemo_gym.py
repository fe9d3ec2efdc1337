"""The training tokens that NeMo Gym 0.7 captures, on a log: its contracts of a token sink, its source and a lineage resolver.

    token_id_capture:
      sink: fleetbus.client.nemo_gym:TokenStore
      sink_kwargs: {url: "nats://host:4222"}
      lineage_store: fleetbus.client.nemo_gym:build_lineage_store
      lineage_store_kwargs: {url: "nats://host:4222"}

The log is that of a run of its own, which is made on first use with the rights of its admin. Nothing of nemo_gym is imported
before it is needed. Each object has a connection on a loop of its own, so it may be made and called on any loop. Above it is
NeMo Gym, below it `fleetbus.client.capture_log`.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.client.blocking import AUTH_VARIABLE, wait_on_loop
from fleetbus.client.capture_log import CaptureLog, Stored
from fleetbus.errors import BusError

T = TypeVar("T")

URL_VARIABLE = "FLEETBUS_NATS_URL"
CAPTURES = "captures"
"""The run whose log holds the records, and nothing else: no worker of it trims the log."""

_PACKAGE = "nemo_gym.token_id_capture"


class TokenStore:
    """A token sink and a token source of NeMo Gym in one object: a model server puts, a trainer freezes and drops.

    ``url``: of the server (default: the variable FLEETBUS_NATS_URL); ``run``: of which log; ``auth``: where the server wants a
    key, the folder of keys or the file of credentials (FLEETBUS_NATS_AUTH). Calls raise
    `fleetbus.client.capture_log.CaptureClosed` after a freeze, `CaptureConflict` for a call with other tokens, and
    `fleetbus.errors.FleetbusError` where no server is found, or none answers within 30 s.
    """

    def __init__(self, url: str = "", *, run: str = CAPTURES, auth: str = "") -> None:
        self._client = _Client(url, run, auth)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Say, before the call, that there will be a record; without one the snapshot is incomplete."""
        await self._client.wait(lambda log: log.begin_call(rollout_id, model_call_id))

    async def put(self, entry: Any) -> None:
        """Store a ``TokenEntry``; once this returns every process sees it. The same entry again does nothing."""
        payload = await asyncio.to_thread(_encode, entry)
        await self._client.wait(lambda log: log.put(entry.rollout_id, entry.model_call_id, payload))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Say that a record is missing; a snapshot that was taken before cannot be dropped any more."""
        await self._client.wait(lambda log: log.mark_incomplete(rollout_id, model_call_id))

    async def freeze(self, rollout_id: str) -> Any:
        """Close the rollout and return its ``TokenCaptureSnapshot``; the same again until somebody marks it."""
        frozen = await self._client.wait(lambda log: log.freeze(rollout_id))
        entries = await asyncio.to_thread(lambda: tuple(map(_decode, frozen.records.values())))
        return import_module(f"{_PACKAGE}.protocols").TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=entries,
            incomplete=frozen.incomplete,
            snapshot_id=frozen.snapshot_id,
            version=frozen.version,
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove exactly this snapshot; False if the rollout has another version by now."""
        return await self._client.wait(lambda log: log.drop(rollout_id, snapshot_id, version))

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """Forget rollouts that were dropped longer ago than that, and return how many."""
        return await self._client.wait(lambda log: log.sweep(older_than_seconds))

    async def close(self) -> None:
        """Close the connection; harmless when repeated. Nothing is ever buffered."""
        await asyncio.to_thread(self._client.close)


def build_lineage_store(url: str = "", *, run: str = CAPTURES, auth: str = "", **cache: int) -> Any:
    """A ``LineageResolver`` over what a `TokenStore` with the same arguments has stored. The matching, the reconstruction of
    deltas and the ``cache`` limits are those of Gym's ``IncrementalLineageStore``. Raises `ImportError` without nemo_gym."""
    lineage = import_module(f"{_PACKAGE}.lineage")

    class LogLineageStore(lineage.IncrementalLineageStore):  # type: ignore[misc, name-defined]  # nemo_gym is not there
        client = _Client(url, run, auth)

        def _fetch_new_entries(self, rollout_id: str, cursor: int | None) -> tuple[list[tuple[Any, Any]], int]:
            capture = self.client.call(lambda log: log.read(rollout_id))
            if cursor is not None and (capture.version < cursor or capture.retired):
                raise lineage.IncrementalLineageStore.CursorReset
            found = capture.records.items() if capture.retired is None else ()
            refs = [(call, stored) for call, stored in found if capture.places[call] > (cursor or 0)]
            return list(zip(self._load_entries(rollout_id, refs), refs, strict=True)), capture.version

        def _load_entry(self, rollout_id: str, ref: tuple[str, Stored]) -> Any:
            return _decode(self.client.call(lambda log: log.load(rollout_id, *ref)))

        async def close(self) -> None:
            await super().close()
            await asyncio.to_thread(self.client.close)

    return LogLineageStore(**cache)


class _Client:
    """A connection on a thread of its own, opened by the first call; a call that finds no server leaves it closed."""

    def __init__(self, url: str, run: str, auth: str) -> None:
        self._url = url or os.environ.get(URL_VARIABLE, "")
        if not self._url:
            raise ValueError(f"url must be given, or {URL_VARIABLE} in the environment")
        self._run, self._auth = run, auth or os.environ.get(AUTH_VARIABLE, "")
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._opened: tuple[BlockingPortal, asyncio.AbstractEventLoop, CaptureLog] | None = None
        self._closed = False

    def call(self, function: Callable[[CaptureLog], Awaitable[T]]) -> T:
        """Wait for an operation in a thread that has no loop running."""
        portal, _, log = self._open()
        return portal.call(function, log)

    async def wait(self, function: Callable[[CaptureLog], Awaitable[T]]) -> T:
        """The same on an asyncio loop; cancelling it cancels the operation."""
        opened = self._opened
        _, loop, log = opened if opened is not None else await asyncio.to_thread(self._open)
        return await wait_on_loop(loop, function, log)

    def close(self) -> None:
        with self._lock:
            self._closed, self._opened = True, None
            self._stack.close()
            atexit.unregister(self.close)

    def _open(self) -> tuple[BlockingPortal, asyncio.AbstractEventLoop, CaptureLog]:
        with self._lock:
            if self._closed:
                raise ValueError("this store is closed")
            if self._opened is None:
                with ExitStack() as stack:
                    portal = stack.enter_context(start_blocking_portal("asyncio", backend_options={"use_uvloop": True}))
                    log = stack.enter_context(portal.wrap_async_context_manager(self._connect()))
                    self._opened = portal, portal.call(asyncio.get_running_loop), log
                    self._stack = stack.pop_all()
                atexit.register(self.close)
            return self._opened

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[CaptureLog]:
        access = build_access("admin", self._auth, self._run)
        async with connect(self._url, run=self._run, role="admin", worker="captures", **access) as bus:
            try:
                await bus.log_state()
            except BusError:  # there is none: whoever wants a limit makes the run before, with `fleetbus init`
                await bus.declare(msgspec.structs.replace(plan_run(self._run, lanes=0, max_bytes=0), consumers=()))
            yield CaptureLog(bus, self._run)


def _encode(entry: Any) -> bytes:
    """The same bytes for the same entry: a retry is told from a conflict by them."""
    return json.dumps(entry.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


def _decode(payload: bytes) -> Any:
    return import_module(f"{_PACKAGE}.records").TokenEntry.model_validate(json.loads(payload))
