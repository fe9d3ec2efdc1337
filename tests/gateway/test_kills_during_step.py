"""kill -9 in the middle of a step, of the worker and then of the gateway, for both gateways: same rewards, same step count."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import WebSocketException

from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.support.counting_environment import REWARD, STEPS
from tests.support.gateway_processes import SUBJECTS, ProcessDeployment, free_port, repeat_until_answered, start_processes
from tests.support.gym_service import Wire, new_boundary
from tests.support.openenv_process import openenv_python

ENVIRONMENT = "tests.support.counting_environment:CountingEnvironment"
PLAYED = ["one", "slow two", "slow three", "four", "five"]
RETRY_SECONDS = 0.1


class Scene:
    """A gateway, two workers, and the file in which every step is marked that begins."""

    def __init__(self, fleet: ProcessDeployment, kind: str, folder: Path) -> None:
        self.fleet = fleet
        self.marks = folder / "marks"
        self.port = str(free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        self._kind = kind

    async def start(self, *names: str) -> None:
        for name in names:
            command = (
                ("gateway", self._kind, "--port", self.port)
                if name[0] == "g"
                else ("environment", "--environment", ENVIRONMENT)
            )
            await self.fleet.start(name, *command)

    async def wait_until_started(self, text: str) -> None:
        """Until a step is being executed."""
        while not self.marks.exists() or text not in self.marks.read_text().split("\n"):  # noqa: ASYNC110
            await anyio.sleep(0.02)

    async def steps(self, session: str) -> list[str]:
        """What was executed for good."""
        journal = await read_session_journal(self.fleet.bus, SUBJECTS, session)
        return [record.call.text for record in journal.records if record.call.call == "step"]

    async def kill_worker(self, session: str) -> None:
        claim = (await read_session_journal(self.fleet.bus, SUBJECTS, session)).claim
        assert claim is not None
        self.fleet.kill(claim.worker)


@asynccontextmanager
async def scene(kind: str, folder: Path, *, seconds: float = 110) -> AsyncIterator[Scene]:
    async with start_processes(folder, seconds=seconds) as fleet:
        here = Scene(fleet, kind, folder)
        await here.start("g1", "e1", "e2")
        yield here


async def play_through(here: Scene, session: str, step: Callable[[str], Awaitable[Any]]) -> list[Any]:
    """Five steps; the worker dies in the second, the gateway in the third."""
    told = [await step("one")]
    for text, kill in (("slow two", "worker"), ("slow three", "gateway")):
        async with anyio.create_task_group() as group:

            async def play(text: str = text) -> None:
                told.append(await step(text))

            group.start_soon(play)
            await here.wait_until_started(text)
            if kill == "worker":
                await here.kill_worker(session)
            else:
                here.fleet.kill("g1")
                await here.start("g2")
    told += [await step("four"), await step("five")]
    assert await here.steps(session) == PLAYED, "each step is in the journal once, in its order"
    marked = here.marks.read_text().split()
    assert marked.count("one") == 2, "the second worker did again what the first had done"
    return told


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_remote_gym_client_does_not_notice(tmp_path: Path) -> None:
    async with scene("gym", tmp_path) as here, httpx.AsyncClient() as client:
        wire = Wire(client, here.url)
        session = (await wire.connect({"marks": str(here.marks)}))["session_id"]

        async def step(text: str) -> tuple[str, float, bool]:
            told = await repeat_until_answered(wire, session, text, boundary=new_boundary())
            return told["obs"], told["reward"], told["done"]

        told = await play_through(here, session, step)
        assert told == [(f"{count}: {text}", REWARD, count == STEPS) for count, text in enumerate(PLAYED, 1)]


class Player:
    """An OpenEnv client that connects anew, and says again what was not answered, under the same request id."""

    def __init__(self, url: str) -> None:
        self._url = f"{url.replace('http', 'ws', 1)}/ws"
        self._socket: Any = None

    async def ask(self, kind: str, **data: Any) -> dict[str, Any]:
        while True:
            try:
                if self._socket is None:
                    self._socket = await connect_socket(self._url)
                await self._socket.send(json.dumps({"type": kind} | ({"data": data} if data else {})))
                told = json.loads(await self._socket.recv())
                assert told["type"] != "error", told
                return dict(told["data"])
            except (OSError, WebSocketException):
                self._socket = None
                await anyio.sleep(RETRY_SECONDS)

    async def step(self, text: str) -> tuple[str, float, bool]:
        told = await self.ask("step", text=text, metadata={"request_id": text})
        return told["observation"]["text"], told["reward"], told["done"]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_openenv_client_of_a_named_session_does_not_notice(tmp_path: Path) -> None:
    async with scene("openenv", tmp_path) as here:
        player = Player(f"{here.url}/sessions/trial")
        await player.ask("reset", marks=str(here.marks))
        told = await play_through(here, "trial-0", player.step)
        assert told == [(f"{count}: {text}", REWARD, count == STEPS) for count, text in enumerate(PLAYED, 1)]
        assert (await player.ask("state"))["step_count"] == 5
        assert (await player.ask("state"))["count"] == 5


@pytest.mark.openenv
@pytest.mark.timeout(240)
@pytest.mark.skipif(openenv_python() is None, reason="no Python with openenv: `just test-openenv` makes one")
async def test_the_real_openenv_client_goes_on_by_doing_again_what_raised(tmp_path: Path) -> None:
    script = Path(__file__).with_name("openenv_player.py")
    async with scene("openenv", tmp_path, seconds=220) as here:
        command = [str(openenv_python()), str(script), f"{here.url}/sessions/trial", "obey"]
        async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None) as client:
            assert client.stdin is not None and client.stdout is not None
            lines = BufferedByteReceiveStream(client.stdout)

            async def ask(name: str, **arguments: Any) -> Any:
                """One call of the client's; it is made again for as long as it raises, as a trainer would."""
                while True:
                    await client.stdin.send(json.dumps([name, arguments]).encode() + b"\n")  # type: ignore[union-attr]
                    told = json.loads(await lines.receive_until(b"\n", 1 << 20))
                    if not (isinstance(told, dict) and "raised" in told):
                        return told
                    assert "Server error" not in told["raised"], told
                    await anyio.sleep(RETRY_SECONDS)

            async def step(text: str) -> Any:
                return await ask("step", action={"text": text, "metadata": {"request_id": text}})

            await ask("reset", marks=str(here.marks))
            told = await play_through(here, "trial-0", step)
            assert told == [[f"{count}: {text}", REWARD, count == STEPS] for count, text in enumerate(PLAYED, 1)]
            assert (await ask("state"))["step_count"] == 5
            await client.stdin.aclose()
