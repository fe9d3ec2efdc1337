"""FrozenLake on generated maps of four by four that do not slip."""

import random

COUNT = 400
SIZE = 4


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("frozen-lake")
    return [
        {
            "key": f"lake-{number}",
            "prompt": "",
            "env_key": "lake",
            "seed": number,
            "config": {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "desc": _draw_map(draw)}},
        }
        for number in range(COUNT)
    ]


def _draw_map(draw: random.Random) -> list[str]:
    """A map whose goal can be reached."""
    while True:
        cells = [["H" if draw.random() < 0.2 else "F" for _ in range(SIZE)] for _ in range(SIZE)]
        cells[0][0], cells[-1][-1] = "S", "G"
        if _is_reachable(cells):
            return ["".join(row) for row in cells]


def _is_reachable(cells: list[list[str]]) -> bool:
    seen, edge = {(0, 0)}, [(0, 0)]
    while edge:
        row, column = edge.pop()
        for near in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= near[0] < SIZE and 0 <= near[1] < SIZE
            if inside and near not in seen and cells[near[0]][near[1]] != "H":
                seen.add(near)
                edge.append(near)
    return (SIZE - 1, SIZE - 1) in seen
