"""Measures a model call of an agent: through fleetbus's endpoint, of the engine directly, through OpenEnv's capture proxy.

    OPENENV_PYTHON=.venv-openenv/bin/python python benchmarks/agent_calls.py --json      # after `just test-openenv`

The engine is scripted: it answers at once with token ids and log-probabilities, over HTTP as vLLM does, and as a sampler in an
inference worker. Every client holds one conversation that grows by an answer and a message with each call; the same clients, in
one process, ask all three, one after another, in every round, after some calls that do not count. Through fleetbus a call is an
Observation and an Action in the log of a real server before it is answered; the proxy keeps calls in memory. ``p50_ms`` and
``p99_ms`` are of a call as its client sees it; ``cpu_us`` is CPU per call of each process, which says what the queue of 32
clients waits for, on a machine with other work too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import httpx
import psutil
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, RunSettings
from fleetbus_schemas import EpisodeRequested, PolicyPublished, Subjects, Task, encode
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate

RUN = "agentcalls"
TOKENS = 32
MESSAGE = "y" * 200
SYSTEM = "You answer. " + "x" * 1000
READY_SECONDS = 180  # agents of this benchmark wait for each other before they call, and start some at a time
SCRIPT = Path(__file__).resolve()
WARM_CALLS = 3


class TextTemplate(ScriptedTemplate):
    """Says the same as the engine over HTTP."""

    def decode_text(self, ids: object) -> str:
        return MESSAGE


async def serve_engine(port: int) -> None:
    """An OpenAI-style engine that answers at once with ids as vLLM gives them."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    entries = [{"token": "t", "logprob": -1.0, "bytes": None, "top_logprobs": []}] * TOKENS

    async def answer(request: Request) -> Response:
        messages = json.loads(await request.body())["messages"]
        prompt = [5] * sum(40 + (len(message["content"]) // 4) for message in messages)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": MESSAGE},
            "finish_reason": "stop",
            "token_ids": [7] * TOKENS,
            "logprobs": {"content": entries},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": TOKENS, "total_tokens": len(prompt) + TOKENS}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}
        return Response(json.dumps(body | {"prompt_token_ids": prompt}), media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)).serve()


async def serve_workers(url: str, clients: int) -> None:
    """An inference worker and an environment worker, each with its own connection, in processes of their own."""
    from fleetbus_workers.environment.specs import build_environment_factory
    from fleetbus_workers.environment.worker import run_environment
    from fleetbus_workers.inference.worker import run_inference

    name = os.environ["BENCHMARK_WORKER"]
    role = name.partition("-")[0]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    configuration = Configuration(
        run=RunSettings(name=RUN),
        environment=EnvironmentSettings(
            slots=clients, agent_isolation="off", pass_variables="AGENT_KEYS", agent_reward_url=True
        ),
        inference=InferenceSettings(slots=128, max_model_len=1 << 20),
    )
    async with connect(url, run=RUN, role=role, worker=name) as bus:
        if role == "inference":
            sampler, template = ScriptedSampler(tokens=TOKENS), TextTemplate()
            await run_inference(
                bus, configuration=configuration, name=name, drain=anyio.Event(), sampler=sampler, template=template
            )
        else:
            spec = f"agent:{sys.executable} {SCRIPT} --agent"
            factory = build_environment_factory(spec, verifier=None, configuration=configuration)  # type: ignore[arg-type]
            async with factory.run():
                await run_environment(bus, configuration=configuration, name=name, drain=anyio.Event(), make=factory)


def wait_as_agent() -> None:
    """An agent that lends its key to the clients of this benchmark, until they are done."""
    file = Path(os.environ["AGENT_KEYS"], str(os.getpid()))
    file.with_suffix(".part").write_text(json.dumps([os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]))
    file.with_suffix(".part").rename(file.with_suffix(".json"))
    while file.parent.exists():
        time.sleep(0.2)


async def converse(url: str, key: str, calls: int, warm: asyncio.Barrier, latencies: list[float]) -> None:
    """One client: HTTP/1.1 by hand over one connection, so that little of what is measured is the client."""
    host, _, path = url.removeprefix("http://").partition("/")
    address, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(address, int(port))
    messages = [{"role": "system", "content": SYSTEM}]
    for number in range(WARM_CALLS + calls):
        if number == WARM_CALLS:
            await warm.wait()
        messages.append({"role": "user", "content": MESSAGE})
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": TOKENS}).encode()
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        started = time.perf_counter()
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        content = await reader.readexactly(int(answer.partition("content-length:")[2].partition("\r\n")[0]))
        if number >= WARM_CALLS:
            latencies.append(time.perf_counter() - started)
        if " 200 " not in answer.partition("\r\n")[0]:
            raise SystemExit(f"{answer}{content.decode()[:300]}")
        messages.append({"role": "assistant", "content": json.loads(content)["choices"][0]["message"]["content"]})
    writer.close()


async def ask_all(sessions: list[list[str]], calls: int) -> dict[str, float]:
    latencies: list[float] = []
    warm = asyncio.Barrier(len(sessions) + 1)
    async with asyncio.TaskGroup() as group:
        for url, key in sessions:
            group.create_task(converse(url, key, calls, warm, latencies))
        await warm.wait()
        started, spent = time.perf_counter(), time.process_time()
    wall, spent = time.perf_counter() - started, time.process_time() - spent
    latencies.sort()
    return {
        "calls_per_second": round(len(latencies) / wall, 1),
        "p50_ms": round(1e3 * statistics.median(latencies), 3),
        "p99_ms": round(1e3 * latencies[int(0.99 * len(latencies))], 3),
        "cpu_us_clients": round(1e6 * spent / len(latencies)),
    }


async def run_clients(sessions: list[list[str]], calls: int) -> dict[str, float]:
    """In a process of their own."""
    command = [sys.executable, __file__, "--clients-of", json.dumps(sessions), "--calls", str(calls)]
    done = await anyio.run_process(command, stderr=None)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def read_cpu(process: int) -> float:
    """Seconds of CPU."""
    spent = psutil.Process(process).cpu_times()
    return spent.user + spent.system


async def run_clients_of(processes: dict[str, int], sessions: list[list[str]], calls: int) -> dict[str, float]:
    """The same with the CPU per call of these processes, calls that do not count included."""
    before = {name: read_cpu(process) for name, process in processes.items()}
    found = await run_clients(sessions, calls)
    played = len(sessions) * (WARM_CALLS + calls) / 1e6
    return found | {f"cpu_us_{name}": round((read_cpu(process) - before[name]) / played) for name, process in processes.items()}


@asynccontextmanager
async def running(*command: str, **variables: str) -> AsyncIterator[int]:
    """A process, by its id."""
    process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def wait_for_port(port: int) -> None:
    with anyio.fail_after(READY_SECONDS):
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                return
            except OSError:
                await anyio.sleep(0.05)


async def measure_fleetbus(clients: int, calls: int, workers: int) -> dict[str, float]:
    subjects = Subjects(RUN)
    async with temporary_server() as url, connect(url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=2, max_bytes=2 << 30))
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(subjects.policy("default"), encode(policy))
        serve = (sys.executable, __file__, "--serve", url, "--clients", str(-(-clients // workers)))
        names = ["inference", *(f"environment-{number}" for number in range(workers))]
        with tempfile.TemporaryDirectory() as keys:
            async with AsyncExitStack() as stack:
                processes = {}
                for name in names:
                    started = running(*serve, BENCHMARK_WORKER=name, AGENT_KEYS=keys)
                    processes[name] = await stack.enter_async_context(started)
                (processes["nats"],) = (each.pid for each in psutil.Process().children() if "nats-server" in each.name())
                for number in range(clients):
                    await request(bus, subjects, f"e{number}", calls)
                sessions = await anyio.to_thread.run_sync(read_keys, Path(keys), clients)
                return await run_clients_of(processes, sessions, calls)


def read_keys(folder: Path, count: int) -> list[list[str]]:
    """URL and key of each agent, as soon as all have said them; runs in a thread."""
    until = time.monotonic() + READY_SECONDS
    while len(found := list(folder.glob("*.json"))) < count:
        if time.monotonic() > until:
            raise SystemExit(f"{len(found)} of {count} agents have started within {READY_SECONDS} s")
        time.sleep(0.1)
    return [json.loads(file.read_text()) for file in found]


async def request(bus: Any, subjects: Subjects, episode: str, calls: int) -> None:
    asked = EpisodeRequested(
        episode_id=episode,
        group_id=episode,
        sample_index=0,
        split="train",
        task=Task(key=episode),
        policy="default",
        max_turns=WARM_CALLS + calls + 1,
        max_tokens=1 << 20,
        deadline_ns=bus.now_ns() + 600 * 10**9,
    )
    await bus.publish(subjects.task("default", episode), encode(asked), expected_last=0)


async def measure_proxy(python: str, engine: int, port: int, clients: int, calls: int) -> dict[str, float]:
    proxy = (python, "-m", "openenv.core.harness.capture.server", "--llm-url", f"http://127.0.0.1:{engine}/v1")
    options = ("--model", "policy", "--port", str(port), "--capture-level", "tokens")
    async with running(*proxy, *options):
        await wait_for_port(port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as admin:
            opened = [(await admin.post("/sessions", json={})).json()["session_id"] for _ in range(clients)]
        return await run_clients([[f"http://127.0.0.1:{port}/v1", session] for session in opened], calls)


async def main(rounds: int, counts: list[int], calls: int, workers: int, as_json: bool) -> None:
    python = os.environ.get("OPENENV_PYTHON", "")
    engine, proxy = find_free_port(), find_free_port()
    async with running(sys.executable, __file__, "--engine", str(engine)) as serving:
        await wait_for_port(engine)
        for clients in counts:
            found: dict[str, list[dict[str, float]]] = {"direct": [], "fleetbus": [], "openenv": []}
            for _ in range(rounds):
                direct = [[f"http://127.0.0.1:{engine}/v1", "k"]] * clients
                found["direct"].append(await run_clients_of({"engine": serving}, direct, calls))
                found["fleetbus"].append(await measure_fleetbus(clients, calls, workers))
                if python:
                    found["openenv"].append(await measure_proxy(python, engine, proxy, clients, calls))
            report(clients, found, as_json)


def report(clients: int, found: dict[str, list[dict[str, float]]], as_json: bool) -> None:
    """Medians over the rounds."""
    row: dict[str, Any] = {"clients": clients}
    for name, rows in found.items():
        row |= {f"{name}_{key}": statistics.median(each[key] for each in rows) for key in rows[0]} if rows else {}
    row["added_p50_ms"] = round(row["fleetbus_p50_ms"] - row["direct_p50_ms"], 3)
    if found["openenv"]:
        row["ratio_to_openenv"] = round(row["fleetbus_calls_per_second"] / row["openenv_calls_per_second"], 3)
    print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def find_free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--calls", type=int, default=40, help="calls of one client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment-workers", type=int, default=1, help="that share the clients")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        wait_as_agent()
    elif options.engine:
        asyncio.run(serve_engine(options.engine))
    elif options.serve:
        uvloop.run(serve_workers(options.serve, int(options.clients)))
    elif options.clients_of:
        print(json.dumps(uvloop.run(ask_all(json.loads(options.clients_of), options.calls))))
    else:
        counts = [int(count) for count in options.clients.split(",")]
        uvloop.run(main(options.rounds, counts, options.calls, options.environment_workers, options.json))
