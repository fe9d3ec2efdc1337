"""The real OpenEnv client plays through the gateway. Opt-in (`just test-openenv`): it lives in an environment of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.openenv_gateway import gateway
from tests.support.openenv_process import openenv_python

PLAYER = Path(__file__).with_name("openenv_player.py")

pytestmark = [
    pytest.mark.openenv,
    pytest.mark.timeout(180),
    pytest.mark.skipif(openenv_python() is None, reason="no Python with openenv: `just test-openenv` makes one"),
]


async def play(url: str, what: str = "play") -> dict[str, Any]:
    played = await anyio.run_process([str(openenv_python()), str(PLAYER), url, what])
    return dict(json.loads(played.stdout))


async def test_the_real_client_plays_an_episode() -> None:
    async with gateway(seconds=150) as here:
        told = await play(here.url)
        assert told["seen"] == [["Add to 7", None, False], ["one", 0.5, False], ["two", 0.5, False], ["three", 0.5, True]]
        assert told["steps"] == 3
        await here.empty()


async def test_the_real_client_of_tools_lists_and_calls_them_and_every_call_is_a_step() -> None:
    async with gateway(seconds=150) as here:
        told = await play(here.url, "tools")
        assert told["listed"] == ["add"]
        assert told["told"] == ["5", "9", "Tool 'nope' failed: Unknown tool: 'nope'"]
        assert (told["reward"], told["steps"]) == (0.5, 2)
        await here.empty()
        assert here.world.opened == here.world.closed


async def test_the_validation_of_the_real_package_passes() -> None:
    async with gateway(seconds=150) as here:
        command = [str(openenv_python()), "-m", "openenv.cli", "validate", "--url", here.url, "--json"]
        checked = await anyio.run_process(command, check=False)
        assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
        assert json.loads(checked.stdout)["passed"] is True


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


async def test_what_its_own_servers_get_wrong_goes_right_here() -> None:
    async with gateway(seconds=150) as here:
        told = await play(here.url, "defects")
        assert "reset first" in told["early"], "a step before reset is refused"
        assert "an action has a text" in told["bad action"], "a bad action is refused, and the session goes on"
        assert told["steps"] == 2
        assert told["metadata"] == {"score": "NaN"}, "what is no number is told"
        assert "rewarded nan" in told["not a number"], "and is no reward"
        assert here.world.steps == ["one", "two", "nan"]
        await here.empty()


async def test_a_client_that_waits_less_than_a_step_takes_never_plays_another_episode_unawares() -> None:
    """On its own servers the next step goes to an environment that was never reset, or finds the server at capacity."""
    async with gateway(slots=1, seconds=150, capacity_timeout=60) as here:
        told = await play(here.url, "timeouts")
        assert told["own timed out"] and told["named timed out"]
        assert "reset first" in told["own again"], "a connection of its own is gone, and with it the episode: it is told"
        assert told["own steps"] == 0
        assert told["own next"] == "hello 2", "the slot is waited for, until the step that nobody waits for has ended"
        assert told["named again"] == "", "under a name and an id the repetition joins the step that still runs"
        assert told["named steps"] == 1
        assert here.world.steps == ["slow4", "slow4"], "one by each client"


async def test_a_client_that_stopped_answering_frees_its_slot() -> None:
    async with gateway(slots=1, seconds=150) as here:
        async with await anyio.open_process([str(openenv_python()), str(PLAYER), here.url, "wait"]) as client:
            assert client.stdout is not None
            assert (await client.stdout.receive()).startswith(b"begun")
            client.send_signal(signal.SIGSTOP)
            try:
                await here.empty()
                assert here.world.closed == 1
            finally:
                client.kill()
