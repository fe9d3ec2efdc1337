"""Runs the deployment that docs/cluster.md describes, for a while, and does to it what an operator and a data centre do.

    python benchmarks/soak_deployed.py --minutes 120 --json

Three nats-servers with routes, TLS and keys; two environment workers, an inference worker, the learner, the recorder, and as
viewers `top`, `metrics` and `monitor`: all of them the commands of docs/roles.md, each with the keys' folder, training the
starter policy. In turn, each beside a run that trains: a quiet time, in which the lines that every process logs are counted; a
restart of every process; a restart of every server; one server down; certificates renewed with a bundle; a worker's key
replaced; a full disk under one server (needs root, for a file system of its own).

``deaths`` are processes that ended although nobody asked them to. After each chapter it measures how long the next step of
training takes. At the end the learner stops, every episode gets its outcome, and the log with the archive is audited. Exits
with 1 if a process died, the audit does not balance, or the server's log has a violation of rights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import anyio.lowlevel
import structlog

from benchmarks.deployed_processes import Place
from benchmarks.until_signal import run_until_signal
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.renewal import renew_certificates
from fleetbus.auth.rotation import rotate_key
from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.config.load import dump_configuration
from fleetbus.config.settings import (
    Configuration,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.errors import BusError, UserError
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import StepTrained, Subjects
from tests.support.servers import RunningServers, _read_routes, _reload, _write_configs, running_servers

RUN = "deployed"
LANES = 8
MAX_BYTES = 1 << 28
ROLES = ("environment", "inference", "learner", "recorder")
STEP_SECONDS = 180.0
"""In which a run that works trains a step, whatever was done to it before."""

FINISH_SECONDS = 180.0
"""For episodes that are under way when the learner stops."""

DISK_MIB = 700

SHARES = {"quiet": 0.2, "away": 1 / 12, "disk": 1 / 24}
"""Of the whole time: without any disturbance, with one server down, with a full disk. In two hours 24, 10 and 5 minutes."""


def build_plan() -> RunPlan:
    return plan_run(RUN, lanes=LANES, max_bytes=MAX_BYTES, replicas=3)


def build_settings(servers: RunningServers, folder: Path) -> Configuration:
    assert servers.auth is not None
    return Configuration(
        run=RunSettings(name=RUN, folder=str(folder / "runs")),
        nats=NatsSettings(url=servers.url, auth=str(servers.auth.path), lanes=LANES, replicas=3, max_bytes=MAX_BYTES),
        limits=LimitSettings(episode=120, grace=15, drain=5),
        learner=LearnerSettings(steps=1_000_000, groups=4, group_size=4, checkpoint_every=5),
        evaluation=EvaluationSettings(episodes=0),
    )


class Deployment:
    """Servers, places, and what was seen of them."""

    def __init__(self, servers: RunningServers, folder: Path, minutes: float) -> None:
        assert servers.auth is not None
        self.servers = servers
        self.auth: AuthFolder = servers.auth
        self.folder = folder
        self._seconds = minutes * 60
        self._subjects = Subjects(RUN)
        self._steps = 0
        self._trained = anyio.Event()
        self._watch = anyio.CancelScope()
        self._began = anyio.current_time()
        self.places = self._build_places()
        self.report: dict[str, Any] = {"minutes": minutes, "seconds_until_next_step": {}}

    def _build_places(self) -> dict[str, Place]:
        config = str(self.folder / "config.json")
        program = [sys.executable, "-m", "fleetbus"]
        commands = {
            "environment-0": ["environment", "--config", config],
            "environment-1": ["environment", "--config", config],
            "inference-0": ["inference", "--config", config],
            "learner-0": ["learner", "--config", config],
            "recorder-0": ["recorder", "--config", config, "--archive", str(self.folder / "archive")],
            "top": ["top", "--config", config, "--json"],
            "metrics": ["metrics", "--config", config, "--port", "-1", "--jsonl", str(self.folder / "metrics.jsonl")],
            "monitor": ["monitor", "--config", config, "--port", "0"],
        }
        return {
            name: Place(name, [*program, *command], self.folder, is_named=command[0] in ROLES)
            for name, command in commands.items()
        }

    def list_chapters(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name, in their order: what is done to the deployment, each until the next step is trained."""
        return {
            "start": anyio.lowlevel.checkpoint,
            "quiet": self._stay_quiet,
            "restarts of processes": self._restart_processes,
            "restarts of servers": self._restart_servers,
            "one server down": self._take_server_down,
            "certificates": self._renew_certificates,
            "key": self._replace_key,
            "full disk": self._fill_disk,
        }

    async def run(self) -> dict[str, Any]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._count_steps)
            for place in self.places.values():
                tasks.start_soon(place.keep_running)
            for name, play in self.list_chapters().items():
                await self._play(name, play)
            await self._rest()
            await self._finish()
            tasks.cancel_scope.cancel()
        return await self._conclude()

    async def _play(self, name: str, play: Callable[[], Awaitable[None]]) -> None:
        print(f"{round(anyio.current_time() - self._began, 1)} s: {name}", file=sys.stderr, flush=True)
        for place in self.places.values():
            place.during = name
        await play()
        began = anyio.current_time()
        self.report["seconds_until_next_step"][name] = await self._wait_for_step(began)

    async def _wait_for_step(self, began: float) -> float | None:
        trained = self._trained
        with anyio.move_on_after(STEP_SECONDS):
            await trained.wait()
            return round(anyio.current_time() - began, 1)
        return None

    async def _count_steps(self) -> None:
        """Read what is trained; a connection that fails is opened anew, with what the folder of keys holds by then."""
        start = 1
        while True:
            with anyio.CancelScope() as self._watch, suppress(BusError, UserError, TimeoutError):
                async with (
                    self.servers.connect(RUN, "admin-soak") as bus,
                    bus.read([self._subjects.train("default")], start=start) as reader,
                ):
                    while True:
                        entry = await reader.receive()
                        start = entry.sequence + 1
                        if any(True for _ in decode_entries(StepTrained, [entry])):
                            self._steps += 1
                            trained, self._trained = self._trained, anyio.Event()
                            trained.set()
            await anyio.sleep(0.5)

    async def _stay_quiet(self) -> None:
        """``top --json`` writes a line a second on purpose, and the learner one for each step: they are not counted."""
        before = {name: place.count_lines() for name, place in self.places.items() if name != "top"}
        seconds = self._seconds * SHARES["quiet"]
        await anyio.sleep(seconds)
        self.report["log_lines_per_minute"] = {
            name: round((self.places[name].count_lines() - lines) / seconds * 60, 2) for name, lines in before.items()
        }

    async def _restart_processes(self) -> None:
        for place in self.places.values():
            await place.restart()
            await self._wait_for_step(anyio.current_time())

    async def _restart_servers(self) -> None:
        for server in self.servers.processes:
            await server.stop()
            await server.restart()
            await self._wait_for_step(anyio.current_time())

    async def _take_server_down(self) -> None:
        server = self.servers.processes[1]
        before = self._steps
        await server.stop()
        await anyio.sleep(self._seconds * SHARES["away"])
        self.report["steps_with_one_server_down"] = self._steps - before
        await server.restart()

    async def _renew_certificates(self) -> None:
        """The bundle first, to everybody; then the servers' new certificate; then the new authority alone."""
        for _ in range(3):
            step = renew_certificates(self.auth, days=1).step
            self.reload_servers()
            if step != "show":
                await self._restart_all()
            await self._wait_for_step(anyio.current_time())

    async def _restart_all(self) -> None:
        self._watch.cancel()
        for place in self.places.values():
            await place.restart()

    async def _replace_key(self) -> None:
        """The environment workers' key; its holders end, and are started again with the new one."""
        rotate_key(self.auth, RUN, "environment")
        _write_configs(self.auth, _read_routes(self.auth))
        workers = [self.places[name] for name in ("environment-0", "environment-1")]
        for worker in workers:
            worker.expect_end()
        began = anyio.current_time()
        self.reload_servers()
        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(worker.wait_until_restarted)
        self.report["seconds_until_workers_have_the_new_key"] = round(anyio.current_time() - began, 2)

    async def _fill_disk(self) -> None:
        store = self.servers.processes[2].store
        if not store.is_mount():
            self.report["full_disk"] = "not possible here: needs root"
            return
        filler, before = store / "filler", self._steps
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        await anyio.sleep(self._seconds * SHARES["disk"])
        self.report["steps_with_a_full_disk"] = self._steps - before
        filler.unlink()
        await self.servers.processes[2].stop()
        await self.servers.processes[2].restart()

    def reload_servers(self) -> None:
        for server in self.servers.processes:
            _reload(server)

    async def _rest(self) -> None:
        """What is left of the time."""
        for place in self.places.values():
            place.during = "rest"
        await anyio.sleep_until(self._began + self._seconds)

    async def _finish(self) -> None:
        await self.places["learner-0"].retire()
        await anyio.sleep(5)
        with anyio.move_on_after(FINISH_SECONDS):
            while await self._count_open():  # noqa: ASYNC110  # other processes finish them
                await anyio.sleep(2)
        for place in self.places.values():
            await place.retire()

    async def _count_open(self) -> int:
        """Episodes that have no result."""
        books = (await self._audit())[1].get("books", {"running": 1, "waiting": 0})
        return int(books["running"] + books["waiting"])

    async def _audit(self) -> tuple[int, dict[str, Any]]:
        options = ["--config", str(self.folder / "config.json"), "--archive", str(self.folder / "archive"), "--json"]
        command = [sys.executable, "-m", "fleetbus", "audit", RUN, *options]
        ended = await anyio.run_process(command, check=False, stderr=None)
        return ended.returncode, json.loads(ended.stdout or b"{}")

    async def _conclude(self) -> dict[str, Any]:
        code, audited = await self._audit()
        deaths = [death for place in self.places.values() for death in place.deaths]
        return self.report | {
            "steps": self._steps,
            "deaths": [f"{each.place}: {each.status} during {each.during}: {each.said}" for each in deaths],
            "audit_exit": code,
            "audit": {key: audited.get(key) for key in ("balanced", "findings", "books")},
            "violations": await self.servers.violations(),
        }


@contextmanager
def small_disk(store: Path) -> Iterator[None]:
    """A file system of its own for one server's store, where this user may mount one."""
    store.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(store)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(store)], check=False)


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[RunningServers]:
    """The servers with the run declared on them, and its configuration in ``config.json`` of the folder."""
    plan = build_plan()
    async with running_servers(folder, [plan], form="cluster") as servers:
        await servers.declare(plan)
        (folder / "config.json").write_bytes(dump_configuration(build_settings(servers, folder)))
        yield servers


async def soak(folder: Path, minutes: float) -> dict[str, Any]:
    """The report, within its time and some more."""
    with small_disk(folder / "nats2"), anyio.fail_after(minutes * 60 + 20 * STEP_SECONDS):
        async with deployed(folder) as servers:
            return await Deployment(servers, folder, minutes).run()


def is_sound(report: dict[str, Any]) -> bool:
    stood = None in report["seconds_until_next_step"].values()
    return not (report["deaths"] or report["violations"] or report["audit_exit"] or stood)


def run_in_folder(play: Callable[[Path], Awaitable[dict[str, Any]]], options: argparse.Namespace) -> int:
    """Play in the folder that the command line names, or a temporary one; print the report, and return the exit status."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="deployed-", ignore_cleanup_errors=True) as temporary:
        work = partial(play, options.folder or Path(temporary))
        report = anyio.run(run_until_signal, work, backend_options={"use_uvloop": True})
    if not report:
        return 130
    print(json.dumps(report, indent=None if options.json else 2))
    return 0 if is_sound(report) else 1


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep stores, keys and logs there")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    return parser


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    options = parser.parse_args()
    return run_in_folder(partial(soak, minutes=options.minutes), options)


if __name__ == "__main__":
    sys.exit(main())
