"""The real OpenEnv client plays through the gateway. Opt-in (`just test-openenv`): it lives in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.gateway.test_openenv_gateway import gateway
from tests.support.openenv_process import openenv_python

PLAYER = Path(__file__).with_name("openenv_player.py")

pytestmark = [
    pytest.mark.openenv,
    pytest.mark.timeout(180),
    pytest.mark.skipif(openenv_python() is None, reason="no Python with openenv: `just test-openenv` makes one"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def play(url: str) -> dict[str, Any]:
    python = openenv_python()
    assert python is not None
    played = await anyio.run_process([str(python), str(PLAYER), url])
    return dict(json.loads(played.stdout))


async def test_the_real_client_plays_an_episode() -> None:
    async with gateway(seconds=150) as here:
        told = await play(here.url)
        assert told["seen"] == [["Add to 7", None, False], ["one", 0.5, False], ["two", 0.5, False], ["three", 0.5, True]]
        assert told["steps"] == 3
        await here.empty()


async def test_more_real_clients_than_slots_wait_for_their_turn() -> None:
    async with gateway(slots=1, seconds=150, capacity_timeout=120) as here:
        played: list[dict[str, Any]] = []

        async def one() -> None:
            played.append(await play(here.url))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(one)
        assert [told["steps"] for told in played] == [3, 3, 3]
        assert here.world.opened == 3
