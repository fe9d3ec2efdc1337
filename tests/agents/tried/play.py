"""One episode of an agent as it is shipped, through the gateway, from the session to the reward."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from fleetbus.audit.run import audit_run
from tests.agents.gateway_support import bearer, grader
from tests.agents.tried.catalogue import Shipped
from tests.agents.tried.outcome import Played
from tests.agents.tried.place import Place
from tests.agents.tried.policy import ANSWER
from tests.agents.tried.stage import SUBJECTS, Balancer, Stage

PROMPT = "Look at the places 1 and 2, peek at the place 3, and say the sum."
SECONDS = {"calm": 240, "disturbed": 240}
PAUSE = 0.4
"""After a call was seen: its answer takes longer."""

BYTES_SHOWN = 6000


async def play(stage: Stage[Balancer], agent: Shipped, folder: Path, scratch: Path, mode: str) -> Played:
    """``mode`` is `calm` or `disturbed`. The agent is given the time of `SECONDS`, and is ended then."""
    episode = f"{agent.name}-{mode}"
    stage.balancer.forget()
    await stage.request(episode, PROMPT)
    session = await stage.take()
    home = scratch / mode
    shutil.rmtree(home, ignore_errors=True)
    place = Place(folder, home, session, PROMPT)
    said, status = await run_agent(stage, agent, place, episode, mode)
    async with httpx.AsyncClient(timeout=90, headers=bearer(session)) as client:
        reward = {"reward": 1.0 if ANSWER in said and status == 0 else 0.0}
        await post_reward(client, session, reward)
        shown = (await client.get(session["url"] + "/trajectory")).json()
    result = await stage.result(episode)
    return Played(
        result=result,
        trained=await stage.count_trained(result) if result is not None else 0,
        turns=shown["turns"],
        said=said,
        status=status,
        paths=[path for path in stage.balancer.list_paths() if "/sessions/" not in path],
        answered=list(stage.balancer.answered),
        probes=len(stage.balancer.list_paths("HEAD")),
        balanced=(await audit_run(stage.bus, SUBJECTS)).balanced,
    )


async def run_agent(stage: Stage[Any], agent: Shipped, place: Place, episode: str, mode: str, *before: str) -> tuple[str, int]:
    """The text that it printed, and its status: -9 if it had to be ended. ``before`` are words before its command."""
    command = [*before, *agent.start(place)]
    log = place.home / "said.log"
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
            command,
            cwd=place.work,
            env=place.variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            async with anyio.create_task_group() as group:
                if mode == "disturbed":
                    group.start_soon(disturb, stage, agent, episode)
                with anyio.move_on_after(SECONDS[mode]):
                    while process.poll() is None:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
                group.cancel_scope.cancel()
        finally:
            status = process.poll()
            end_all_of(place.home)
            process.wait()
    text = log.read_text(errors="replace")
    return text[-BYTES_SHOWN:], -9 if status is None else status


def end_all_of(home: Path) -> None:
    """An agent may leave a server of its own behind, in a session of its own: its HOME tells."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


async def disturb(stage: Stage[Any], agent: Shipped, episode: str) -> None:
    """Kill the inference worker in the middle of one answer, and the gateway in the middle of another."""
    inference, gateway = agent.kills
    await wait_for_call(stage, episode, inference)
    stage.start_inference("disturbed")
    await wait_for_call(stage, episode, gateway)
    await stage.kill_gateway()


async def wait_for_call(stage: Stage[Any], episode: str, number: int) -> None:
    while await stage.count_calls(episode) <= number:  # noqa: ASYNC110
        await anyio.sleep(0.1)
    await anyio.sleep(PAUSE)


async def post_reward(client: httpx.AsyncClient, session: dict[str, str], reward: dict[str, float]) -> None:
    """Until the gateway that has the session takes it: after a kill that is when its lease has ended."""
    with anyio.move_on_after(60):
        while True:
            try:
                answer = await client.post(session["url"] + "/reward", json=reward, headers=grader(session))  # type: ignore[arg-type]
                if answer.status_code < 500:
                    return
            except httpx.TransportError:
                pass
            await anyio.sleep(0.5)
