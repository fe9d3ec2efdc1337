"""FrozenLake on generated maps of four by four that do not slip."""

import random

COUNT = 400
SIZE = 4
MOVES = {"down": (1, 0), "up": (-1, 0), "right": (0, 1), "left": (0, -1)}


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("frozen-lake")
    return [_build_task(number, *_draw_map(draw)) for number in range(COUNT)]


def _build_task(number: int, lines: list[str], path: list[str]) -> dict[str, object]:
    return {
        "key": f"lake-{number}",
        "prompt": "",
        "env_key": "lake",
        "seed": number,
        "config": {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "desc": lines}, "oracle": path},
    }


def _draw_map(draw: random.Random) -> tuple[list[str], list[str]]:
    """A map whose goal can be reached, and how."""
    while True:
        cells = [["H" if draw.random() < 0.2 else "F" for _ in range(SIZE)] for _ in range(SIZE)]
        cells[0][0], cells[-1][-1] = "S", "G"
        path = _find_path(cells)
        if path:
            return ["".join(row) for row in cells], path


def _find_path(cells: list[list[str]]) -> list[str]:
    """The shortest way from the first to the last cell around all holes; empty if there is none."""
    paths: dict[tuple[int, int], list[str]] = {(0, 0): []}
    edge = [(0, 0)]
    while edge:
        row, column = edge.pop(0)
        for name, (down, right) in MOVES.items():
            near = row + down, column + right
            inside = 0 <= near[0] < SIZE and 0 <= near[1] < SIZE
            if inside and near not in paths and cells[near[0]][near[1]] != "H":
                paths[near] = [*paths[row, column], name]
                edge.append(near)
    return paths.get((SIZE - 1, SIZE - 1), [])
