"""64 agents at once while the workers that serve them are killed: ``just agent-kills``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    PolicyPublished,
    Subjects,
    Task,
    decode,
    encode,
)
from tests.agents.gateway_support import find_port
from tests.support.processes import children
from tests.support.servers import connect, run_server

RUN = "kills"
AGENT = Path(__file__).with_name("impatient_agent.py")
SESSIONS = Path(__file__).with_name("impatient_sessions.py")
SUBJECTS = Subjects(RUN)

WORKER = """
import os, sys, anyio, structlog
from fleetbus.bus.nats import connect
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, LimitSettings, RunSettings
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.servers import AUTH_VARIABLE, build_access

role, name, url, agent = sys.argv[1:]
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
configuration = Configuration(
    run=RunSettings(name="kills"),
    environment=EnvironmentSettings(slots=32, max_attempts=1000, agent_reward_url=True),
    inference=InferenceSettings(slots=64, max_model_len=1 << 16),
    limits=LimitSettings(reset=120, step=120, episode=600),
)

async def main():
    access = build_access(role, os.environ.get(AUTH_VARIABLE, ""), "kills")
    async with connect(url, run="kills", role=role, worker=name, **access) as bus:
        drain = anyio.Event()
        if role == "inference":
            sampler = ScriptedSampler(delay=lambda request: 0.05)
            engine = {"sampler": sampler, "template": ScriptedTemplate()}
            await run_inference(bus, configuration=configuration, name=name, drain=drain, **engine)
        else:
            factory = build_environment_factory(agent, verifier=None, configuration=configuration)
            async with factory.run():
                await run_environment(bus, configuration=configuration, name=name, drain=drain, make=factory)

anyio.run(main)
"""


@contextmanager
def worker(role: str, name: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    spec = f"agent:{sys.executable} -I -S {AGENT}"
    with subprocess.Popen([sys.executable, "-c", WORKER, role, name, url, spec]) as process:
        try:
            yield process
        finally:
            process.kill()


Start = Callable[[int], AbstractContextManager["subprocess.Popen[bytes]"]]
"""Starts the process at a place, 0 or 1."""


async def kill_in_turn(start: Start, seconds: float, pause: float) -> None:
    """Two processes, one of them killed every few seconds and another started for it; then both are let be until cancelled."""
    places = [start(place) for place in range(2)]
    running = [place.__enter__() for place in places]
    kills, until = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            await anyio.sleep(pause)
            place = kills % 2
            running[place].send_signal(signal.SIGKILL)
            await anyio.to_thread.run_sync(running[place].wait)
            places[place] = start(place)
            running[place] = places[place].__enter__()
            kills += 1
        await anyio.sleep_forever()
    finally:
        for each in places:
            each.__exit__(None, None, None)


async def ask_for_episodes(bus: Bus, seconds: float, at_once: int) -> int:
    """Keep so many out until time is up; how many there were, when all have ended."""
    asked, until = 0, time.monotonic() + seconds
    out: set[str] = set()
    async with bus.read([SUBJECTS.episodes]) as reader:
        while out or time.monotonic() < until:
            while len(out) < at_once and time.monotonic() < until:
                episode = f"a{asked}"
                await bus.publish(SUBJECTS.task("default", episode), encode(build_request(bus, episode)), expected_last=0)
                out.add(episode)
                asked += 1
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                out.discard(entry.episode_id)
    return asked


async def wait_for_agents(bus: Bus, log: Path) -> None:
    """An episode may have ended while the answer that tells its agent so died with a gateway: the agent asks once more."""
    entries = [decode_episode_entry(entry) async for entry in bus.scan([SUBJECTS.episodes])]
    played = sum(isinstance(entry, EpisodeFinished) and entry.turns > 0 for entry in entries)
    with anyio.move_on_after(60):
        while len((await anyio.Path(log).read_text()).splitlines()) < played:  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.1)


def build_request(bus: Bus, episode: str) -> EpisodeRequested:
    return EpisodeRequested(
        episode_id=episode,
        group_id=episode,
        sample_index=0,
        split="eval",
        task=Task(key="t", prompt="p"),
        policy="default",
        max_turns=50,
        max_tokens=1 << 15,
        deadline_ns=bus.now_ns() + 900 * 10**9,
    )


@asynccontextmanager
async def run_log(store: Path) -> AsyncIterator[tuple[str, Bus]]:
    """The log of a run with a policy, on a server of its own; its address too."""
    async with run_server(store) as server, connect(server.url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=16, max_bytes=2 << 30))
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(policy))
        yield server.url, bus


@asynccontextmanager
async def fleet(store: Path) -> AsyncIterator[tuple[str, Bus]]:
    async with run_log(store) as (url, bus):
        with worker("inference", "i0", url):
            yield url, bus


LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="LONG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "at_once", "pause"),
    [
        pytest.param(20, 64, 5, id="more than a worker plays in its life"),
        pytest.param(45, 8, 12, id="episodes end between the kills"),
        pytest.param(120, 64, 5, id="two minutes", marks=LONG),
    ],
)
@pytest.mark.timeout(600)
async def test_no_call_is_played_twice_while_workers_are_killed(
    seconds: float, at_once: int, pause: float, tmp_path: Path
) -> None:
    async with fleet(tmp_path) as (url, bus):
        async with anyio.create_task_group() as group:
            names = (f"e{number}" for number in range(1000))
            group.start_soon(kill_in_turn, lambda _: worker("environment", next(names), url), seconds, pause)
            asked = await ask_for_episodes(bus, seconds, at_once)
            group.cancel_scope.cancel()
        report = await audit_run(bus, SUBJECTS)
        assert report.balanced, report.findings
        entries = [decode_episode_entry(entry) async for entry in bus.scan([SUBJECTS.episodes])]
        seen = await count_calls(bus)
    results = [entry for entry in entries if isinstance(entry, EpisodeFinished)]
    assert len(results) == len({result.episode_id for result in results}) == asked
    wrong = [result for result in results if (result.outcome, result.reward, result.turns) != ("completed", 1.0, 4)]
    assert not wrong, "what an agent saw was covered by its own repetitions"
    assert not any(result.segments for result in results), "a repetition that is sampled again would begin a segment"
    taken_over = sum(result.attempt > 1 for result in results)
    ended = asked - at_once
    print(f"{asked} episodes, {taken_over} taken over, {ended} ended while kills went on, {sum(seen.values())} calls played")
    assert max(seen.values()) == 1 and taken_over
    assert ended > 0 or pause < 10, "who lives longer than a lease gets on"
    assert not children()


def gateway(port: int, url: str, folder: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    options = ["--run", RUN, "--nats", url, "--port", f"{port}", "--environment-max-attempts", "1000"]
    return started([sys.executable, "-m", "fleetbus", "gateway", "agents", *options], folder, f"gateway-{port}.log")


@contextmanager
def started(command: list[str], folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the length of the body; what it says is appended to ``log``."""
    with (folder / log).open("ab") as said, subprocess.Popen(command, cwd=folder, stdout=said, stderr=said) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "at_once", "pause"),
    [pytest.param(30, 16, 8, id="half a minute"), pytest.param(120, 64, 5, id="two minutes", marks=LONG)],
)
@pytest.mark.timeout(600)
async def test_agents_outside_get_on_while_gateways_are_killed(
    seconds: float, at_once: int, pause: float, tmp_path: Path
) -> None:
    ports = [find_port(), find_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with fleet(tmp_path) as (url, bus):
        with started([sys.executable, str(SESSIONS), f"{at_once}", *urls], tmp_path, "agents.log"):
            async with anyio.create_task_group() as group:
                group.start_soon(kill_in_turn, lambda place: gateway(ports[place], url, tmp_path), seconds, pause)
                asked = await ask_for_episodes(bus, seconds, at_once)
                await wait_for_agents(bus, tmp_path / "agents.log")
                group.cancel_scope.cancel()
        report = await audit_run(bus, SUBJECTS)
        assert report.balanced, report.findings
        entries = [decode_episode_entry(entry) async for entry in bus.scan([SUBJECTS.episodes])]
        seen = await count_calls(bus)
    results = {entry.episode_id: entry for entry in entries if isinstance(entry, EpisodeFinished)}
    lines = (tmp_path / "agents.log").read_text().splitlines()
    assert not [line for line in lines if not line.startswith("played ")], (
        "what an agent saw was covered by its own repetitions"
    )
    played = [line.split()[1] for line in lines]
    assert len(results) == asked and len(played) == len(set(played))
    wrong = [results[each] for each in played if (results[each].outcome, results[each].turns) != ("completed", 4)]
    assert not wrong and not any(result.segments for result in results.values())
    lost = [results[each] for each in results if each not in played]
    odd = [
        (each.outcome, each.turns, each.error, each.attempt) for each in lost if (each.outcome, each.turns) != ("timeout", 0)
    ]
    assert not odd, "of others the answer that gave them died on its way"
    taken_over = sum(result.attempt > 1 for result in results.values())
    print(f"{asked} episodes, {taken_over} taken over, {len(lost)} never reached an agent, {sum(seen.values())} calls played")
    assert taken_over and len(lost) < asked // 2
    assert not children()


async def count_calls(bus: Bus) -> Counter[tuple[str, int, str]]:
    """How often a call was played, by episode, attempt and what it says; an observation that is sent again is the same turn."""
    said: dict[tuple[str, int, int], str] = {}
    seen: Counter[tuple[str, int, str]] = Counter()
    answered: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    async for entry in bus.scan([SUBJECTS.observations(), SUBJECTS.actions()]):
        if entry.subject.split(".", 3)[2] == "obs":
            observation = decode(Observation, entry.payload)
            turn = (observation.episode_id, observation.attempt, observation.turn)
            if turn not in said:
                said[turn] = str(observation.messages[-1].content)
                seen[(*turn[:2], said[turn])] += 1
        else:
            action = decode(Action, entry.payload)
            answered[action.episode_id, action.attempt, action.turn] += 1
    assert max(answered.values()) == 1, "no turn was sampled twice"
    return seen
