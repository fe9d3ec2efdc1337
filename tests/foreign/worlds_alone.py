"""Games of BrowserGym's MiniWoB++ and of ScienceWorld with these packages alone: ``python worlds_alone.py NAME FILE``.

FILE holds ``[[CONFIG, SEED, [ACTION, ...]], ...]``. Prints one list of rewards, step by step, for each game; an episode ends
where the package says so, whatever actions are left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_page(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """A MiniWoB++ page after its reset, and what it shows."""
    place = importlib.util.find_spec("miniwob")
    os.environ["MINIWOB_URL"] = f"{(Path(str(place and place.origin)).parent / 'html/miniwob').as_uri()}/"
    import browsergym.miniwob  # noqa: F401 - registers the tasks
    import gymnasium
    from browsergym.core.action.highlevel import HighLevelActionSet

    actions = HighLevelActionSet("miniwob_all")
    patience = f"timeout={config['action_timeout']}"  # not the half second of BrowserGym's actions: the machine is busy
    arguments: dict[str, Any] = {"action_mapping": lambda text: actions.to_python_code(text).replace("timeout=500", patience)}
    arguments |= config["kwargs"]
    page = gymnasium.make(f"browsergym/miniwob.{config['id']}", **arguments)
    return page, page.reset(seed=seed)[0]


def step_page(page: Any, actions: list[str]) -> list[float]:
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, _ = page.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    page.close()
    return rewards


def open_world(config: dict[str, Any], *, solved: bool = False) -> Any:
    """A world of ScienceWorld after its reset; with ``solved`` it knows the actions that solve it."""
    from scienceworld import ScienceWorldEnv

    world = ScienceWorldEnv("", envStepLimit=100)
    world.load(config["name"], config["variation"], "easy", generateGoldPath=solved)
    world.reset()
    return world


def step_world(world: Any, actions: list[str]) -> list[float]:
    rewards = []
    for action in actions:
        _, reward, over, _ = world.step(action)
        rewards.append(reward / 100)
        if over:
            break
    world.close()
    return rewards


PLAY: dict[str, Callable[[dict[str, Any], int, list[str]], list[float]]] = {
    "miniwob": lambda config, seed, actions: step_page(open_page(config, seed)[0], actions),
    "scienceworld": lambda config, _, actions: step_world(open_world(config), actions),
}


def main(name: str, file: str) -> None:
    print(json.dumps([PLAY[name](*game) for game in json.loads(Path(file).read_text())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
