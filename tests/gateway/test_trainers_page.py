"""Code that `docs/trainers.md` shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.gym_service import Counter, Handler, running

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def shown(word: str) -> str:
    """The example on the page that has this word in it."""
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in block)
    return str(example)


async def test_the_service_around_a_class_of_one_s_own_plays() -> None:
    names: dict[str, Any] = {"MyEnvironment": lambda config: Counter(Handler(), int(config["goal"]))}
    exec(shown("class MyHandler"), names)
    async with running(names["app"]) as wire:
        session = (await wire.connect({"goal": 1}))["session_id"]
        assert (await wire.call(session, "step", action_str="x"))["done"] is True


def test_every_example_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        compile(block, str(PAGE), "exec", flags=0x2000)  # `await` outside of functions


def test_flags_on_the_page_are_those_of_the_commands() -> None:
    from fleetbus_workers.cli.roles.gateway import gym, openenv

    flags = {option for command in (gym, openenv) for parameter in command.params for option in parameter.opts}
    told = set(re.findall(r"`(--[a-z-]+)", PAGE.read_text()))
    assert told - flags == {"--inference-engine"}
