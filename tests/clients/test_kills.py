"""Other projects' own clients play on while workers and gateways are killed and connections cut: no step is lost or doubled.

Opt-in (`just test-clients`): each client lives in an environment of its own, as `OpenEnv` needs an older `mcp`. A fault comes
after so many further steps have been recorded, so that steps are under way; the journals say what was executed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus_schemas import SessionRecorded
from fleetbus_workers.environment.stepwise.journal_log import decode_journal_entry, read_session_journal
from tests.support.counting_environment import REWARD
from tests.support.gateway_processes import RUN, SUBJECTS, ProcessDeployment, free_port, start_processes
from tests.support.relay import Relay

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STEP_SECONDS = 0.15
"""So that kills hit steps in the middle."""

ENVIRONMENT = "tests.support.counting_environment:CountingEnvironment"
EPISODES, PARALLEL, STEPS = 24, 8, 15
STEPS_PER_FAULT = 25
MIN_FAULTS = 6

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def find_python(name: str) -> str:
    """The Python of ``.venv-NAME`` or ``NAME_PYTHON``."""
    python = Path(os.environ.get(f"{name.upper()}_PYTHON") or ROOT / f".venv-{name}" / "bin" / "python")
    assert python.is_file(), f"there is no {python}: `just test-clients` and `just test-trainers` make theirs"
    return str(python)


class Faults:
    """Kills and cuts in turn, each after `STEPS_PER_FAULT` further recorded steps, until cancelled. The file ``enough`` is
    there once there were `MIN_FAULTS`: a slow machine takes longer to start what was killed than the first episodes last."""

    def __init__(self, fleet: ProcessDeployment, relay: Relay, *, gateway: tuple[str, ...], enough: Path) -> None:
        self._fleet = fleet
        self.enough = enough
        self._relay = relay
        self._gateway = gateway
        self._started = 0
        self.done: list[str] = []

    async def start(self) -> None:
        for _ in range(2):
            await self._start_worker()
        if self._gateway:
            await self._fleet.start("g0", *self._gateway)

    async def run(self) -> None:
        kinds = [self._kill_worker, self._cut, *([self._kill_gateway] if self._gateway else [])]
        recorded = 0
        async with self._fleet.bus.read([SUBJECTS.session("*")]) as reader:
            while True:
                message = decode_journal_entry(await reader.receive())
                if isinstance(message, SessionRecorded) and message.call.call == "step":
                    recorded += 1
                    if recorded % STEPS_PER_FAULT == 0:
                        await kinds[len(self.done) % len(kinds)]()
                        if len(self.done) >= MIN_FAULTS:
                            self.enough.touch()

    async def _start_worker(self) -> None:
        self._started += 1
        await self._fleet.start(f"e{self._started}", "environment", "--environment", ENVIRONMENT)

    async def _kill_worker(self) -> None:
        self._fleet.kill(min(name for name in self._fleet.processes if name[0] == "e"))
        self.done.append("worker killed")
        await self._start_worker()

    async def _kill_gateway(self) -> None:
        (name,) = (name for name in self._fleet.processes if name[0] == "g")
        self._fleet.kill(name)
        self.done.append("gateway killed")
        await self._fleet.start(f"g{len(self.done)}", *self._gateway)

    async def _cut(self) -> None:
        await self._relay.cut()
        self.done.append("connections cut")
        await self._relay.mend()


@asynccontextmanager
async def faulty_run(folder: Path, kind: str, *options: str) -> AsyncIterator[tuple[Faults, str]]:
    """Workers, a gateway of that kind (empty: none), and the address at which a client finds it through a relay."""
    async with start_processes(folder, seconds=280) as fleet:
        port = free_port()
        gateway = ("gateway", kind, "--port", str(port), "--environment", ENVIRONMENT, *options) if kind else ()
        relay = Relay(f"http://127.0.0.1:{port}" if kind else fleet.url)
        async with relay.running():
            faults = Faults(fleet, relay, gateway=gateway, enough=folder / "enough")
            await faults.start()
            yield faults, relay.url if not kind else relay.url.replace("nats://", "http://")


async def play(python: str, script: str, facts: dict[str, Any], faults: Faults) -> list[dict[str, Any]]:
    """What the client was told, per episode."""
    facts = {"episodes": EPISODES, "parallel": PARALLEL, "steps": STEPS, "run": RUN, "enough": str(faults.enough)} | facts
    async with anyio.create_task_group() as group:
        group.start_soon(faults.run)
        command = [python, str(FOLDER / script), json.dumps(facts)]
        played = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False)
        group.cancel_scope.cancel()
    assert played.returncode == 0, played.stdout.decode()[-4000:]
    return [json.loads(line) for line in played.stdout.decode().splitlines() if line.startswith("{")]


async def check(faults: Faults, episodes: list[dict[str, Any]], record_property: Any) -> None:
    """Lost: told to the client and not in the journal, or never told. Doubled: executed twice for good."""
    assert len(episodes) >= EPISODES
    expected = [f"step {number}" for number in range(1, STEPS + 1)]
    lost = doubled = 0
    for episode in episodes:
        journal = await read_session_journal(faults._fleet.bus, SUBJECTS, episode["session"])
        steps = [record.call.text for record in journal.records if record.call.call == "step"]
        lost += len(set(expected) - set(steps))
        doubled += len(steps) - len(set(steps))
        assert episode["count"] == STEPS
        seen = [[f"{number}: step {number}", REWARD, number == STEPS] for number in range(1, STEPS + 1)]
        assert episode["told"] == seen, "each step is told once, with its own reward"
    counts = {kind: faults.done.count(kind) for kind in sorted(set(faults.done))}
    facts = {"steps": len(episodes) * STEPS, "lost": lost, "doubled": doubled, **counts}
    print(json.dumps(facts))
    for name, value in facts.items():
        record_property(name, value)
    assert (lost, doubled) == (0, 0)
    assert len(faults.done) >= MIN_FAULTS


@pytest.mark.parametrize("options", [(), ("--in-process",)], ids=["separate workers", "workers and in process"])
async def test_the_openenv_client_loses_and_doubles_no_step(
    tmp_path: Path, record_property: Any, options: tuple[str, ...]
) -> None:
    async with faulty_run(tmp_path, "openenv", *options) as (faults, url):
        episodes = await play(find_python("openenv"), "play_openenv.py", {"url": url}, faults)
        await check(faults, episodes, record_property)


@pytest.mark.skipif("VAGEN_CHECKOUT" not in os.environ, reason="VAGEN_CHECKOUT names a checkout of github.com/mll-lab-nu/VAGEN")
@pytest.mark.parametrize("options", [(), ("--in-process",)], ids=["separate workers", "workers and in process"])
async def test_the_vagen_client_loses_and_doubles_no_step(
    tmp_path: Path, record_property: Any, options: tuple[str, ...]
) -> None:
    async with faulty_run(tmp_path, "gym", *options) as (faults, url):
        episodes = await play(find_python("vagen"), "play_vagen.py", {"url": url}, faults)
        await check(faults, episodes, record_property)


async def test_skyrl_environments_lose_and_double_no_step(tmp_path: Path, record_property: Any) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text(
        json.dumps([{"key": "t", "prompt": "Count.", "env_key": "x", "config": {"steps": STEPS, "seconds": STEP_SECONDS}}])
    )
    async with faulty_run(tmp_path / "server", "") as (faults, url):
        episodes = await play(find_python("skyrl"), "play_skyrl.py", {"url": url, "tasks": str(tasks)}, faults)
        await check(faults, episodes, record_property)
