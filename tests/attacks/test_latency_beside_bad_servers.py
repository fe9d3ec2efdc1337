"""One real worker on a real server plays 32 good episodes beside a bad one: their steps stay quick, and none is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.config.settings import EnvironmentSettings, RunSettings
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Environment, Start, Step
from fleetbus_workers.environment.specs import build_environment_factory
from tests.attacks.test_bad_servers import BAD, LINES, OBSERVATIONS
from tests.support.backends import asyncio_alone
from tests.support.servers import connect
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.tool_calls import NoGrader

EPISODES, TURNS = 32, 40
P99_SECONDS = 1.0
ROOT = Path(__file__).parents[2]
WAITED = Path("/proc/thread-self/schedstat")
HTTP = """
import anyio
from tests.attacks.test_bad_servers import BAD, http_server
async def main():
    body, kind, more = BAD[{name!r}]
    async with http_server(body, kind=kind, more=more) as url:
        print(url, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
SOCKETS = """
import json
from websockets.sync.server import serve
from tests.attacks.test_bad_servers import OBSERVATIONS
large = OBSERVATIONS[{name!r}]().encode()
def answer(socket):
    for text in socket:
        if json.loads(text)["type"] == "state":
            socket.send(json.dumps({{"type": "state", "data": {{}}}}))
        else:
            socket.send(large, text=True)
with serve(answer, "127.0.0.1", 0, max_size=None, compression=None) as server:
    print(f"http://127.0.0.1:{{server.socket.getsockname()[1]}}", flush=True)
    server.serve_forever()
"""
CASES = {
    **{f"remote gym, {name}": ("remote-gym:{url}", HTTP, name) for name in BAD},
    **{f"openenv, {name}": ("openenv:{url}", SOCKETS, name) for name in OBSERVATIONS},
    **{f"stdio, {name}": ("stdio", "", name) for name in LINES},
}

anyio_backend = asyncio_alone


def now() -> float:
    """Seconds in which this thread had a processor or nothing to do: while other processes have the processors, it stands."""
    with suppress(FileNotFoundError):  # not Linux
        return time.perf_counter() - int(WAITED.read_text().split()[1]) / 1e9
    return time.perf_counter()


class Measured(ScriptedEnvironment):
    """Writes down how long each action took to come."""

    def __init__(self, latencies: list[float]) -> None:
        super().__init__(TURNS)
        self._latencies = latencies

    async def reset(self) -> Start:
        start = await super().reset()
        self._asked = now()
        return start

    async def step(self, action: Action) -> Step:
        self._latencies.append(now() - self._asked)
        step = await super().step(action)
        self._asked = now()
        return step


class Mixed:
    """Good episodes, and one of the bad server."""

    def __init__(self, bad: EnvironmentFactory, latencies: list[float]) -> None:
        self._bad = bad
        self._latencies = latencies

    def for_task(self, task: Task) -> Environment:
        return self._bad() if task.key == "bad" else Measured(self._latencies)

    def __call__(self) -> Environment:
        raise NotImplementedError


@contextmanager
def bad_server(program: str, name: str) -> Iterator[str]:
    """Its address, in a process of its own: its work is not the worker's."""
    if not program:
        yield ""
        return
    command = [sys.executable, "-c", program.format(name=name)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@asynccontextmanager
async def bad_factory(form: str, url: str, name: str, folder: Path) -> AsyncIterator[EnvironmentFactory]:
    spec = form.format(url=url)
    if form == "stdio":
        script = folder / "server.py"
        script.write_text(f"import sys\n{LINES[name]}")
        spec = f"stdio:{sys.executable} {script}"
    factory = build_environment_factory(spec, verifier=NoGrader())
    async with factory.run():
        yield factory


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
async def test_other_episodes_go_on_within_a_second(case: str, nats_server: NatsServerProcess, tmp_path: Path) -> None:
    form, program, name = CASES[case]
    run = f"bad{list(CASES).index(case)}"
    configuration = build_configuration(run=RunSettings(name=run), environment=EnvironmentSettings(slots=EPISODES + 1))
    latencies: list[float] = []
    with bad_server(program, name) as url:
        async with bad_factory(form, url, name, tmp_path) as factory:
            to_server = partial(connect, nats_server.url, run=run)
            async with small_deployment(configuration, connect=lambda who: to_server(role="up", worker=who)) as fleet:
                fleet.inference("inference")
                fleet.environment("environment", make=Mixed(factory, latencies))  # type: ignore[arg-type]
                with anyio.fail_after(150):
                    await fleet.request("bad", task=Task(key="bad", prompt="play", config={"retries": 0}))
                    for number in range(EPISODES):
                        await fleet.request(f"e{number}")
                    results = await fleet.all_results(EPISODES + 1)
    outcomes = {result.episode_id: result.outcome for result in results}
    assert outcomes.pop("bad") in ("env_failed", "timeout")
    assert set(outcomes.values()) == {"completed"} and len(outcomes) == EPISODES
    ordered = sorted(latencies)
    p99 = ordered[int(len(ordered) * 0.99)]
    print(f"{case}: {len(ordered)} steps, p50 {ordered[len(ordered) // 2] * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")
    assert len(ordered) == EPISODES * TURNS and p99 < P99_SECONDS
