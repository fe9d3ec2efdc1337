"""A server of the Open Reward Standard, for the interpreter that has it: ``python ors_server.py ors|openreward PORT``.

Port 0: any; prints the port that it listens on. Two environments: `Order` sorts words, its rewards add up; `Shelves` is a small
warehouse that the starter policy knows. Not a part of fleetbus: nothing of it is
imported. The packages read annotations, so they are evaluated.
"""

import asyncio
import importlib
import os
import random
import socket
import sys
import threading
from typing import Any

PACKAGES = {"ors": "ors", "openreward": "openreward.environments"}
WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lark mole newt owl pig".split()
NAMES = "bolt nut gear lamp rope nail pump belt hose disk plug fuse cord tape drum tray".split()
FIELDS = ("price", "stock", "shelf")
TROUBLES = {1: "", 2: "raise", 3: "nan", 4: "none", 5: "slow", 6: "unicode", 7: "large"}
"""Misbehaviour of the tasks of the split `trouble`, by index."""


def draw_order(index: int) -> list[str]:
    return random.Random(index).sample(WORDS, 5)


def draw_shelves(index: int) -> dict[str, Any]:
    draw = random.Random(index)
    items = [{"id": id, "name": name} for id, name in zip(draw.sample(range(10, 100), 8), draw.sample(NAMES, 8), strict=True)]
    for item in items:
        item.update({field: draw.randint(10, 99) for field in FIELDS})
    return {"items": items, "name": draw.choice(items)["name"], "field": draw.choice(FIELDS)}


def make_environments(package: str) -> list[type]:
    from pydantic import BaseModel

    ors: Any = importlib.import_module(PACKAGES[package])

    def output(text: str, reward: float | None, finished: bool = False, metadata: Any = None) -> Any:
        return ors.ToolOutput(blocks=[ors.TextBlock(text=text)], reward=reward, finished=finished, metadata=metadata)

    class Pair(BaseModel):
        first: str
        second: str

    class Words(BaseModel):
        words: list[str]

    class Order(ors.Environment):  # type: ignore[misc]
        """Sort five words. A comparison costs 0.01; the answer gives the share of places that are right."""

        @classmethod
        def list_splits(cls) -> list[Any]:
            return [
                *(ors.Split(name=name, type=name) for name in ("train", "test")),
                ors.Split(name="trouble", type="validation"),
            ]

        @classmethod
        def list_tasks(cls, split: str) -> list[Any]:
            first, count = {"train": (0, 50), "test": (1000, 10), "trouble": (0, 8)}[split]
            return [
                {"words": draw_order(first + index), "trouble": TROUBLES.get(index, "") if split == "trouble" else ""}
                for index in range(count)
            ]

        def get_prompt(self) -> list[Any]:
            return [ors.TextBlock(text="Sort these words."), ors.TextBlock(text=" ".join(self.task_spec["words"]))]

        @ors.tool
        def compare(self, pair: Pair) -> ors.ToolOutput:
            """Say which of two words comes first."""
            return output(min(pair.first, pair.second), -0.01)

        @ors.tool
        async def submit(self, given: Words) -> ors.ToolOutput:
            """Give the words in their order; this ends the episode."""
            match self.task_spec["trouble"]:
                case "raise":
                    raise RuntimeError("no dictionary")
                case "nan":
                    return output("?", float("nan"), finished=True)
                case "none":
                    return output("?", None, finished=True)
                case "slow":
                    await asyncio.sleep(60)
                case "unicode":
                    return output("  \u2028\x85 ü\U0001f600 " * 1000, 0.5, finished=True, metadata={"é": "\u2029"})
                case "large":
                    return output("x" * (10 << 20), 0.25, finished=True)
            right = sorted(self.task_spec["words"])
            share = sum(a == b for a, b in zip(given.words, right, strict=False)) / len(right)
            return output("thanks", share, finished=True, metadata={"right": share == 1})

    class Plain(BaseModel):
        """Described as the starter policy was taught to read tools: without titles."""

        @classmethod
        def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
            types = {str: "string", int: "integer"}
            properties = {name: {"type": types[field.annotation]} for name, field in cls.model_fields.items()}
            return {"type": "object", "properties": properties, "required": list(properties)}

    class Name(Plain):
        name: str

    class Field(Plain):
        id: int
        field: str

    class Shelves(ors.Environment):  # type: ignore[misc]
        """Look up one field of one item. Finding the item gives 0.25, reading its field 0.75 and the end."""

        @classmethod
        def list_splits(cls) -> list[Any]:
            return [ors.Split(name="train", type="train"), ors.Split(name="test", type="test")]

        @classmethod
        def list_tasks(cls, split: str) -> list[Any]:
            return [draw_shelves(index + (10_000 if split == "test" else 0)) for index in range(20 if split == "test" else 200)]

        def get_prompt(self) -> list[Any]:
            return [ors.TextBlock(text=f'Read "{self.task_spec["field"]}" of "{self.task_spec["name"]}".')]

        @ors.tool
        def find_item(self, asked: Name) -> ors.ToolOutput:
            """Find the id of an item."""
            found = [item["id"] for item in self.task_spec["items"] if item["name"] == asked.name]
            self._found = bool(found) and asked.name == self.task_spec["name"]
            return output(f'{{"id": {found[0]}}}' if found else "Error: no such item", 0.25 if self._found else 0.0)

        @ors.tool
        def get_field(self, asked: Field) -> ors.ToolOutput:
            """Read a field of an item."""
            items = {item["id"]: item for item in self.task_spec["items"]}
            item = items.get(asked.id, {})
            right = (item.get("name"), asked.field) == (self.task_spec["name"], self.task_spec["field"])
            text = f'{{"{asked.field}": {item[asked.field]}}}' if asked.field in item else "Error: no such field"
            return output(text, 0.75 if right else 0.0, finished=True)

    return [Order, Shelves]


def end_with_parent() -> None:
    """Standard input ends when whoever started this is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    import uvicorn

    package, port = sys.argv[1], int(sys.argv[2])
    app = importlib.import_module(PACKAGES[package]).Server(make_environments(package)).app
    listener = socket.create_server(("127.0.0.1", port))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
