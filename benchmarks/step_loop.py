"""Measures the step loop: a real environment worker and a real inference worker through a real server, beside the floor.

    python benchmarks/step_loop.py --json

The environment answers at once and the sampler returns fixed tokens, so what is measured is fleetbus: claims, sessions,
observations, actions, leases, acks. The floor (`benchmarks/bare_loop.py`) runs on the same machine just before each
measurement. ``ratio`` is fleetbus's steps per second over the floor's. Latency is from the environment's answer to its next
action; CPU is the environment worker's. ``--forms 5`` compares servers instead: an open one, one as `fleetbus up` starts it,
one with keys, accounts and TLS, and three of those with routes among them and three copies of the log; ``--only open,local``
some of them. CPU is then that of the environment worker and the first server, in microseconds per step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import psutil
import structlog
import uvloop

from benchmarks.bare_loop import CONTENT_BYTES, TEXT_BYTES, TOKENS, measure_floor
from benchmarks.load_plan import LoadPlan, compute_distribution, parse_plan, summarize_latencies, temporary_server
from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, RunSettings
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import (
    Action,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    PolicyPublished,
    Subjects,
    Task,
    VersionSpan,
    WorkerStarted,
    encode,
)
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from tests.support.servers import running_servers

RUN = "steploop"
STREAMS = plan_run(RUN, lanes=2, max_bytes=2 << 30)
SLOTS = 128
WARM = "warm"
FORMS = ("open", "local", "keyed", "cluster")


class MeasuredEnvironment(ScriptedEnvironment):
    """Writes down how long each action took to come."""

    latencies: ClassVar[list[float]] = []
    cpu_before: ClassVar[float] = 0.0

    async def open(self, task: Task) -> None:
        if not task.key.startswith(WARM) and not self.cpu_before:
            MeasuredEnvironment.latencies.clear()
            MeasuredEnvironment.cpu_before = time.process_time()
        await super().open(task)

    async def reset(self) -> Start:
        await super().reset()
        self._asked = time.perf_counter()
        return Start(messages=(ChatMessage(role="user", content="y" * CONTENT_BYTES),))

    async def step(self, action: Action) -> Step:
        self.latencies.append(time.perf_counter() - self._asked)
        step = await super().step(action)
        self._asked = time.perf_counter()
        return step if step.terminated else Step(messages=(ChatMessage(role="user", content="y" * CONTENT_BYTES),))

    async def verify(self) -> Verdict:
        return Verdict(reward=1.0)


class FixedSampler(ScriptedSampler):
    """Answers with the same tokens, made once."""

    _ids: ClassVar = [7] * TOKENS
    _logprobs: ClassVar = [-1.0] * TOKENS

    async def generate(self, request: GenerationRequest) -> Generation:
        spans = (VersionSpan(version=self.version, start=0, stop=TOKENS),)
        return Generation(ids=self._ids, logprobs=self._logprobs, finish_reason="stop", versions=spans)


class FixedTemplate(ScriptedTemplate):
    """A prompt delta of fixed length and a text of fixed length: tokenising is not what is measured."""

    _delta: ClassVar = [5] * 40
    _text = "x" * TEXT_BYTES

    def encode_continuation(self, last_sampled: object, messages: object) -> list[int]:
        return list(self._delta)

    def decode_text(self, ids: object) -> str:
        return self._text


def configuration(sessions: int) -> Configuration:
    return Configuration(
        run=RunSettings(name=RUN),
        environment=EnvironmentSettings(slots=max(sessions, 1)),
        inference=InferenceSettings(slots=SLOTS, max_model_len=1 << 20),
    )


async def serve(role: str, url: str, sessions: int, report: str, auth: str) -> None:
    """One worker process; the environment's writes its latencies and CPU when it has drained."""
    from fleetbus_workers.cli.roles.role import tune_collector
    from fleetbus_workers.environment.worker import run_environment
    from fleetbus_workers.inference.worker import run_inference

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    tune_collector()
    drain = anyio.Event()
    access = build_access(role, auth, RUN)
    async with connect(url, run=RUN, role=role, worker=role, **access) as bus, anyio.create_task_group() as group:
        group.start_soon(_drain_at_end_of_input, drain)
        if role == "inference":
            await run_inference(
                bus,
                configuration=configuration(sessions),
                name=role,
                drain=drain,
                sampler=FixedSampler(),
                template=FixedTemplate(),
            )
        else:
            await run_environment(bus, configuration=configuration(sessions), name=role, drain=drain, make=MeasuredEnvironment)
            cpu_seconds = time.process_time() - MeasuredEnvironment.cpu_before
            measured = {"latencies": MeasuredEnvironment.latencies, "cpu_seconds": cpu_seconds}
            await anyio.Path(report).write_text(json.dumps(measured))
        group.cancel_scope.cancel()


async def _drain_at_end_of_input(drain: anyio.Event) -> None:
    await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    drain.set()


@asynccontextmanager
async def worker_process(role: str, url: str, sessions: int, report: Path, auth: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, "--serve", role, "--url", url, "--sessions", str(sessions), "--report", str(report)]
    command += ["--auth", auth]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        await anyio.to_thread.run_sync(process.wait, 30)
    finally:
        process.kill()
        process.wait()


async def measure(url: str, plan: LoadPlan, report: Path, auth: str = "", streams: RunPlan = STREAMS) -> dict[str, Any]:
    """Fleetbus under one plan: ask for the episodes, wait for their results."""
    subjects = Subjects(RUN)
    async with connect(url, run=RUN, role="up", worker="driver", **build_access("up", auth, RUN)) as bus:
        await bus.declare(streams)
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(subjects.policy("default"), encode(policy))
        async with (
            worker_process("inference", url, plan.sessions, report, auth),
            worker_process("environment", url, plan.sessions, report, auth),
        ):
            await _wait_until_started(bus, subjects)
            await _play(bus, subjects, LoadPlan(1, 20), WARM)
            wall = await _play(bus, subjects, plan, "step")
    measured = json.loads(await anyio.Path(report).read_text())
    fields = summarize_latencies(measured["latencies"], wall_seconds=wall, cpu_seconds=measured["cpu_seconds"])
    return {"sessions": plan.sessions, **fields, "latency_ms_by_percentile": compute_distribution(measured["latencies"])}


async def _wait_until_started(bus: Bus, subjects: Subjects) -> None:
    """Both workers have said hello."""
    seen: set[str] = set()
    async with bus.read([subjects.life("*", "*")]) as reader:
        while seen < {"environment", "inference"}:
            seen |= {started.role for _, started in decode_entries(WorkerStarted, [await reader.receive()])}


async def _play(bus: Bus, subjects: Subjects, plan: LoadPlan, prefix: str) -> float:
    """Seconds from the first request to the last result."""
    start = (await bus.log_state()).last_sequence + 1
    started = time.perf_counter()
    async with bus.read([subjects.episodes], start=start) as reader, anyio.create_task_group() as group:
        for index in range(plan.sessions):
            group.start_soon(_request, bus, subjects, f"{prefix}{plan.sessions}x{index}", plan.turns)
        finished = 0
        while finished < plan.sessions:
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                finished += 1
                assert entry.outcome == "completed", entry
    return time.perf_counter() - started


async def _request(bus: Bus, subjects: Subjects, episode: str, turns: int) -> None:
    request = EpisodeRequested(
        episode_id=episode,
        group_id=episode,
        sample_index=0,
        split="train",
        task=Task(key=episode, config={"turns": turns}),
        policy="default",
        max_turns=turns,
        max_tokens=1 << 20,
        deadline_ns=bus.now_ns() + 600 * 10**9,
    )
    await bus.publish(subjects.task("default", episode), encode(request), expected_last=0)


async def main(plans: list[LoadPlan], as_json: bool) -> None:
    for plan in plans:
        async with temporary_server() as url:
            (floor,) = await measure_floor(url, [plan])
        async with temporary_server() as url:
            with tempfile.TemporaryDirectory() as folder:
                ours = await measure(url, plan, Path(folder) / "report.json")
        floor_rate = floor["steps_per_second"]
        row = ours | {"bare_steps_per_second": floor_rate, "ratio": round(ours["steps_per_second"] / floor_rate, 3)}
        row |= {"bare_p50_ms": floor["p50_ms"], "p50_ratio": round(ours["p50_ms"] / floor["p50_ms"], 3)}
        print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


async def compare(plans: list[LoadPlan], repeats: int, as_json: bool, forms: Sequence[str] = FORMS) -> None:
    """Steps per second, and CPU per step, on servers of each form, in turn as all meet the same machine; ratios to open."""
    for plan in plans:
        found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
        for _ in range(repeats):
            for form, pairs in found.items():
                pairs.append(await measure_form(form, plan))
        row: dict[str, Any] = {"sessions": plan.sessions}
        for index, name in enumerate(("rate", "cpu")):
            medians = {form: statistics.median(pair[index] for pair in pairs) for form, pairs in found.items()}
            row |= {f"{form}_{name}_ratio": round(median / medians["open"], 3) for form, median in medians.items()}
            row[name] = medians
        row["found"] = found
        print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


async def measure_form(form: str, plan: LoadPlan) -> tuple[float, float]:
    streams = plan_run(RUN, lanes=2, max_bytes=2 << 30, replicas=3 if form == "cluster" else 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_servers(folder, [streams], form=form) as servers:
            await servers.declare(streams)
            auth = str(servers.auth.path) if servers.auth is not None else ""
            found = await measure(servers.url, plan, folder / "report.json", auth, streams)
            spent = sum(psutil.Process(servers.processes[0].pid).cpu_times()[:2])
    return float(found["steps_per_second"]), found["cpu_us_per_step"] + spent / plan.sessions / plan.turns * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--sessions", default="1,64,256")
    parser.add_argument("--turns", default="400,60,20")
    parser.add_argument("--forms", type=int, default=0, metavar="TIMES", help="so often on servers of each form")
    parser.add_argument("--only", default=",".join(FORMS), help="forms to compare, the open one among them")
    parser.add_argument("--auth", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        work = partial(serve, options.serve, options.url, int(options.sessions), options.report, options.auth)
        anyio.run(work, backend_options={"use_uvloop": True})  # as the roles' commands do
    elif options.forms:
        uvloop.run(compare(parse_plan(options.sessions, options.turns), options.forms, options.json, options.only.split(",")))
    else:
        uvloop.run(main(parse_plan(options.sessions, options.turns), options.json))
