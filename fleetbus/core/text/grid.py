"""Screen coordinates on a grid of 1000 by 1000, as some vision models give them, and in pixels, as screens have them. Pure."""

import math
import re
from collections.abc import Mapping

import msgspec

from fleetbus_schemas import ToolSpec

GRID = 1000
"""Cells per side: coordinate 0 is the first pixel's edge, 1000 the far edge."""

DEFAULT_SCREEN = (1366, 768)
COORDINATES = ("coordinate", "start_coordinate")
_RESOLUTION = re.compile(r"Screen resolution:\s*(\d+)\s*[xX]\s*(\d+)")


def find_screen_size(tool: ToolSpec) -> tuple[int, int]:
    """Width and height in pixels as the tool's description states them, else `DEFAULT_SCREEN`."""
    found = _RESOLUTION.search(tool.description)
    return (int(found[1]), int(found[2])) if found else DEFAULT_SCREEN


def build_grid_tool(tool: ToolSpec) -> ToolSpec:
    """The tool described with the grid in place of its resolution."""
    stated = f"Screen resolution: {GRID}x{GRID}"
    text = _RESOLUTION.sub(stated, tool.description)
    if stated not in text:
        text = f"{text}\n{stated}".strip()
    return msgspec.structs.replace(tool, description=text)


def convert_to_pixels(arguments: Mapping[str, object], screen: tuple[int, int]) -> dict[str, object]:
    """The arguments with their coordinates in pixels, within the screen. Raises `ValueError` naming what is no coordinate."""
    scaled = dict(arguments)
    for name in COORDINATES:
        if name in arguments:
            scaled[name] = _scale(name, arguments[name], screen)
    return scaled


def _scale(name: str, value: object, screen: tuple[int, int]) -> list[int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        raise ValueError(f"{name} must be two numbers between 0 and {GRID}, as [500, 500]")
    return [min(max(int(part / GRID * size), 0), size - 1) for part, size in zip(value, screen, strict=True)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
