"""A run on a real server whose environment workers are gateways for agents: started, killed and asked as from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus.log.episodes import read_episode_state
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, PolicyPublished, Subjects, Task, encode
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.serving.listeners import bind
from tests.support.servers import connect, run_server

RUN = "outside"
SUBJECTS = Subjects(RUN)


class Run:
    """The server, and hands to ask for episodes."""

    def __init__(self, url: str, bus: Bus, folder: Path) -> None:
        self.url = url
        self.bus = bus
        self.folder = folder

    async def request(self, episode: str, *, seconds: float = 300, **fields: Any) -> None:
        """An episode as a learner asks for it."""
        given: dict[str, Any] = {"task": Task(key="t", prompt="Say it."), "group_id": "g", "split": "train", "max_turns": 50}
        asked = EpisodeRequested(
            episode_id=episode,
            sample_index=0,
            policy="default",
            deadline_ns=self.bus.now_ns() + int(seconds * 1e9),
            **(given | fields),
        )
        await self.bus.publish(SUBJECTS.task("default", episode), encode(asked), expected_last=0)

    async def result(self, episode: str) -> EpisodeFinished:
        while True:
            if (result := (await read_episode_state(self.bus, SUBJECTS, episode)).result) is not None:
                return result
            await anyio.sleep(0.05)

    @contextmanager
    def start_gateway(self, port: int, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """A gateway as a process; await `wait_for` before it is asked."""
        command = [sys.executable, "-m", "fleetbus", "gateway", "agents", "--run", RUN, "--nats", self.url, "--port", f"{port}"]
        with subprocess.Popen([*command, *options], cwd=self.folder, env=os.environ | variables) as process:
            try:
                yield process
            finally:
                process.kill()

    @asynccontextmanager
    async def gateway(self, *options: str, **variables: str) -> AsyncIterator[httpx.AsyncClient]:
        """A gateway, and a client of it."""
        port = find_port()
        with self.start_gateway(port, *options, **variables):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                await wait_for(client)
                yield client


def find_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


async def wait_for(client: httpx.AsyncClient) -> None:
    with anyio.fail_after(40):
        while True:
            try:
                assert (await client.get("/v1/models")).status_code == 401
                return
            except httpx.TransportError:
                await anyio.sleep(0.05)


@asynccontextmanager
async def running(folder: Path, sampler: Any = None, template: Any = None, *, max_bytes: int = 1 << 28) -> AsyncIterator[Run]:
    """A run with an inference worker of a scripted engine."""
    configuration = Configuration(run=RunSettings(name=RUN), inference=InferenceSettings(max_model_len=1 << 16))
    async with run_server(folder / "store") as server, connect(server.url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=4, max_bytes=max_bytes))
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(policy))
        async with anyio.create_task_group() as group:

            async def infer() -> None:
                engine: dict[str, Any] = {"sampler": sampler or ScriptedSampler(), "template": template or ScriptedTemplate()}
                async with connect(server.url, run=RUN, role="inference", worker="i0") as own:
                    await run_inference(own, configuration=configuration, name="i0", drain=anyio.Event(), **engine)

            group.start_soon(infer)
            yield Run(server.url, bus, folder)
            group.cancel_scope.cancel()


async def take(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    """The next session of the learner's."""
    answer = await client.get("/sessions/next", params={"wait": 50}, headers=headers)
    assert answer.status_code == 200, answer.text
    session: dict[str, Any] = answer.json()
    return session


def bearer(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['key']}"}


def grader(session: dict[str, Any]) -> dict[str, str]:
    """What ends a session: its reward key, which its agent does not have."""
    return {"Authorization": f"Bearer {session['reward_key']}"}


async def say(client: httpx.AsyncClient, session: dict[str, Any], *said: str, **headers: str) -> httpx.Response:
    """A call whose conversation is these messages, the user's and the policy's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    body = {"model": "policy", "messages": messages}
    return await client.post("/v1/chat/completions", json=body, headers=bearer(session) | headers)


def read_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
