"""A store with two tools: a name has a handle, and a handle has a value."""

import random

from mcp.server import MCPServer

NAMES = "amber birch coral delta ember fjord grove heron ivory jade".split()


def draw_store(seed: int) -> dict[str, tuple[str, int]]:
    """By name its handle and value."""
    draw = random.Random(seed)
    numbers = draw.sample(range(100, 1000), len(NAMES))
    return {name: (f"h{number}", draw.randrange(10, 100)) for name, number in zip(NAMES, numbers, strict=True)}


def make_server(task):
    store = draw_store(task.seed)
    server = MCPServer("store")

    @server.tool()
    def find(name: str) -> str:
        """The handle of a name."""
        return store[name][0]

    @server.tool()
    def get(handle: str) -> int:
        """The value of a handle."""
        return next(value for known, value in store.values() if known == handle)

    return server


make_server.replayable = True
