"""Rows of two resources servers out of NeMo Gym's wheel, played on the real servers: rewards as their own source computes them.

`just test-foreign`; NEMO_GYM_PYTHON names an interpreter (3.13) with what the wheel's servers import, NEMO_GYM_WHEEL the folder
of the unpacked wheel.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.environment.adapters.nemo_gym.environment import NemoGymEnvironment
from tests.support.nemo_gym_wheel import WHEEL, needs_wheel
from tests.support.ports import free_ports
from tests.support.tool_calls import say

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("NEMO_GYM_PYTHON", str(ROOT / ".venv-nemo-gym/bin/python")))
START_SECONDS = 300.0

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(900),
    needs_wheel,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no interpreter for the wheel's servers at {PYTHON}: `just test-foreign`"),
]


@asynccontextmanager
async def real_server(module: str, name: str) -> AsyncIterator[str]:
    (port,) = free_ports(1)
    script = str(Path(__file__).parent / "nemo_gym_server.py")
    command = [str(PYTHON), script, str(WHEEL), module, name, str(port)]
    process = await anyio.open_process(command, cwd=WHEEL, stdout=None, stderr=None)
    url = f"http://127.0.0.1:{port}"
    try:
        with anyio.fail_after(START_SECONDS):
            async with httpx.AsyncClient() as client:
                while True:
                    assert process.returncode is None, "the server ended"
                    try:
                        await client.get(f"{url}/reverify_mode")
                        break
                    except httpx.ConnectError:
                        await anyio.sleep(0.2)
        yield url
    finally:
        process.kill()
        await process.wait()


def read_rows(module: str) -> list[dict[str, Any]]:
    lines = (WHEEL / "resources_servers" / module / "data/example.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def play(url: str, row: dict[str, Any], calls: list[ToolCall]) -> tuple[list[str], float | None]:
    """What the calls gave, and the reward."""
    environment = NemoGymEnvironment(url, 60.0, 60.0, "template")
    try:
        await environment.open(Task(key="t", config={"row": row}))
        await environment.reset()
        step = await environment.step(say("", *calls)) if calls else None
        assert (await environment.step(say("That is all."))).terminated
        verdict = await environment.verify()
        return [str(message.content) for message in step.messages] if step else [], verdict.reward
    finally:
        await environment.close()


def increment(number: int, count: int) -> ToolCall:
    return ToolCall(name="increment_counter", arguments={"count": count}, id=f"c{number}")


async def test_counters_that_keep_their_session_are_verified_as_their_source_says() -> None:
    module, played = "example_session_state_mgmt", 0
    async with real_server(module, "StatefulCounterResourcesServer") as url:
        for row in read_rows(module):
            missing = row["expected_count"] - row["initial_count"]
            for counts, reward in (([1, missing - 1], 1.0), ([missing + 1], 0.0), ([], float(missing == 0))):
                calls = [increment(number, count) for number, count in enumerate(counts)]
                calls += [ToolCall(name="get_counter_value", id="get")] if counts else []
                shown, found = await play(url, row, calls)
                assert found == reward
                assert not shown or json.loads(shown[-1]) == {"count": row["initial_count"] + sum(counts)}
                played += 1
    print(f"{played} of {played} rewards of {module}")


async def test_one_call_of_a_tool_is_verified_as_its_source_says() -> None:
    module, played = "example_single_tool_call", 0
    async with real_server(module, "SimpleWeatherResourcesServer") as url:
        for row in read_rows(module):
            weather = ToolCall(name="get_weather", arguments={"city": "SF"}, id="c")
            shown, reward = await play(url, row, [weather])
            assert reward == 1.0 and json.loads(shown[0])["weather_description"] == "The weather in SF is cold."
            assert (await play(url, row, []))[1] == 0.0
            _, reward = await play(url, row, [ToolCall(name="get_weather", arguments={"town": 1}, id="c")])
            assert reward == 1.0, "the source asks for the call alone"
            played += 3
    print(f"{played} of {played} rewards of {module}")
