"""The runs that a server keeps, found by the names of their streams, and removed with all that belongs to them.

Above it is the command line; below it the JetStream API. A run is its log; lanes and weights are beside it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.bus.nats.api import STREAM_NOT_FOUND, ApiRefused, JetStreamApi
from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import lane_stream, log_stream
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects

_LOG = log_stream("")


class RunOnServer(msgspec.Struct, frozen=True, kw_only=True):
    """``entries`` and ``bytes`` of the log, ``reserved_bytes`` that it may grow to, ``weights_bytes`` of the buckets beside it;
    ``created`` and ``changed`` are RFC 3339 (empty: nothing was stored)."""

    run: str
    entries: int
    bytes: int
    reserved_bytes: int
    weights_bytes: int = 0
    created: str = ""
    changed: str = ""


async def read_log_config(api: JetStreamApi, log: str) -> dict[str, Any]:
    """Settings of the stream that is a run's log. Raises `UserError` if the server has no such run."""
    try:
        info = await api.ask(f"STREAM.INFO.{log}")
    except ApiRefused as refused:
        if refused.code != STREAM_NOT_FOUND:
            raise
        run = log.removeprefix(_LOG)
        raise UserError(
            f"no run {run} on this server: `fleetbus init --run {run}` declares it; or check --run and --nats"
        ) from None
    config: dict[str, Any] = info["config"]
    return config


async def list_runs(api: JetStreamApi) -> list[RunOnServer]:
    """All runs of the account, by name; the server lists its streams in pages."""
    streams: dict[str, dict[str, Any]] = {}
    seen = 0
    while True:
        answer = await api.ask("STREAM.LIST", {"offset": seen})
        page = answer.get("streams") or []
        streams |= {info["config"]["name"]: info for info in page}
        seen += len(page)
        if not page or seen >= answer["total"]:
            break
    runs = [name.removeprefix(_LOG) for name in sorted(streams) if name.startswith(_LOG)]
    return [_run(run, streams) for run in runs if streams[log_stream(run)]["config"].get("subjects") == [Subjects(run).log]]


def _run(run: str, streams: dict[str, dict[str, Any]]) -> RunOnServer:
    log = streams[log_stream(run)]
    buckets = [streams[name] for name in _list_buckets(run) if name in streams]
    return RunOnServer(
        run=run,
        entries=log["state"]["messages"],
        bytes=log["state"]["bytes"],
        reserved_bytes=max(log["config"].get("max_bytes", 0), 0),
        weights_bytes=sum(bucket["state"]["bytes"] for bucket in buckets),
        created=log.get("created", ""),
        changed=log["state"]["last_ts"] if log["state"]["last_seq"] else "",
    )


def _list_buckets(run: str) -> tuple[str, ...]:
    return f"OBJ_{weights_bucket(run)}", f"OBJ_{images_bucket(run)}"


async def remove_run(api: JetStreamApi, run: str) -> None:
    """Remove a run's log, lanes, weights and images; what is gone already is no mistake. The log comes last: it is what is
    listed."""
    for stream in (*_list_buckets(run), lane_stream(run), log_stream(run)):
        try:
            await api.ask(f"STREAM.DELETE.{stream}")
        except ApiRefused as refused:
            if refused.code != STREAM_NOT_FOUND:
                raise
