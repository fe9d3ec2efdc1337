"""Games of MiniWoB++ (20 tasks) and of ScienceWorld (3), solved and played wrongly, as the packages pay
them: ``games/NAME.json``.

``python -m tests.foreign.recorded_worlds NAME`` plays them anew, in the interpreter that ``just test-worlds`` makes. A game is
``[CONFIG, SEED, [ACTION, ...], [REWARD, ...]]``, one reward for each action that the package took.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.foreign.worlds_alone import open_page, open_world, step_page, step_world

FOLDER = Path(__file__).with_name("games")
PAGES = (
    "click-button", "click-test", "click-test-2", "click-test-transfer", "click-option", "click-checkboxes", "click-tab",
    "click-dialog", "click-dialog-2", "enter-text", "enter-password", "login-user", "focus-text", "focus-text-2",
    "click-widget", "click-button-sequence", "enter-text-dynamic", "simple-arithmetic", "unicode-test", "odd-or-even",
)  # fmt: skip
PATIENT = {"kwargs": {"timeout": 60_000}, "action_timeout": 10_000}
"""Milliseconds that a page has to load in, and that an action may take; the package's own are 5,000 and 500."""

WORLDS = ("find-plant", "find-living-thing", "find-non-living-thing")


class Game(NamedTuple):
    config: dict[str, Any]
    seed: int
    actions: list[str]
    rewards: list[float]


class Element(NamedTuple):
    place: str
    role: str
    name: str


def load_games(name: str) -> list[Game]:
    return [Game(*entry) for entry in json.loads((FOLDER / f"{name}.json").read_text())]


def list_elements(tree: str) -> list[Element]:
    return [Element(*found) for found in re.findall(r"\[(\w+)\] (\w+) '(.*?)'", tree)]


def solve(goal: str, elements: list[Element]) -> list[str]:
    """Actions that solve a page, out of its goal: names are quoted in it, or listed before its end."""
    said = re.findall(r'"([^"]*)"', goal) or re.findall(r"(?:Select|button|on) (.*?)(?: and click Submit)?[.]?$", goal)
    wanted = [name for each in said for name in each.split(", ")]
    boxes = [each for each in elements if each.role in ("textbox", "spinbutton")]
    buttons = [each for each in elements if each.role == "button"]
    if sum_asked := re.search(r"(\d+) ([-+x]) (\d+)", goal + " ".join(each.name for each in elements)):
        left, sign, right = int(sum_asked[1]), sum_asked[2], int(sum_asked[3])
        wanted = [str({"+": left + right, "-": left - right, "x": left * right}[sign])]
    if (boxes and "nter" in goal) or sum_asked:
        filled = wanted * len(boxes) if "both" in goal else wanted
        return [f"fill('{box.place}', '{text}')" for box, text in zip(boxes, filled, strict=False)] + [press(buttons[-1])]
    if "ocus" in goal:
        order = re.search(r"(\d+)(?:st|nd|rd|th)", goal)
        return [press(boxes[int(order[1]) - 1 if order else 0])]
    if "close the dialog" in goal.casefold() or 'labeled "x"' in goal:
        return [press(next(each for each in buttons if each.name == "Close"))]
    roles = ("button", "radio", "checkbox", "tab", "link", "generic")
    clicked = [press(each) for name in wanted for each in elements if each.name == name and each.role in roles][: len(wanted)]
    submit = [press(each) for each in buttons if each.name == "Submit" and "Submit" in goal]
    return (clicked or [press(buttons[0])]) + submit


def press(element: Element) -> str:
    return f"click('{element.place}')"


def record_pages(draw: random.Random) -> Iterator[Game]:
    from browsergym.utils.obs import flatten_axtree_to_str

    for place, id in enumerate(PAGES):
        for solved in (True, False)[: 1 + place % 2]:
            seed = draw.randrange(1000)
            config = {"id": id, **PATIENT}
            page, shown = open_page(config, seed)
            elements = list_elements(flatten_axtree_to_str(shown["axtree_object"]))
            wrong = ["push('1')", press(draw.choice(elements)), press(elements[-1])]
            actions = solve(shown["goal"], elements) if solved else wrong
            yield Game(config, seed, actions, step_page(page, actions))


def record_worlds(draw: random.Random) -> Iterator[Game]:
    for name in WORLDS:
        for solved in (True, False):
            config = {"name": name, "variation": draw.randrange(3)}
            world = open_world(config, solved=True)
            actions = list(world.get_gold_action_sequence())[:20]
            if not solved:
                actions[draw.randrange(len(actions))] = draw.choice(["look around", "fly", "focus on air", "inventory"])
            yield Game(config, 0, actions, step_world(world, actions))


RECORD = {"miniwob": record_pages, "scienceworld": record_worlds}


def main(name: str) -> None:
    lines = []
    for config, seed, actions, rewards in RECORD[name](random.Random(name)):
        print(config, seed, actions, rewards, flush=True)
        lines.append(json.dumps([config, seed, actions[: len(rewards)], rewards]))
    (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
