"""Coordinates on a grid of 1000 by 1000 become pixels of the screen that the tool describes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.text.grid import DEFAULT_SCREEN, GRID, build_grid_tool, convert_to_pixels, find_screen_size
from fleetbus_schemas import ToolSpec


@pytest.mark.parametrize(
    ("description", "size"),
    [
        ("Screen resolution: 800x600.", (800, 600)),
        ("Screen resolution:1024 x 768", (1024, 768)),
        ("", DEFAULT_SCREEN),
    ],
)
def test_the_screen_is_as_the_tool_says(description: str, size: tuple[int, int]) -> None:
    assert find_screen_size(ToolSpec(name="computer", description=description)) == size


def test_the_policy_is_told_of_the_grid_alone() -> None:
    shown = build_grid_tool(ToolSpec(name="computer", description="Click. Screen resolution: 800x600. Be quick."))
    assert shown.description == "Click. Screen resolution: 1000x1000. Be quick."
    assert "1000x1000" in build_grid_tool(ToolSpec(name="computer")).description


@given(st.floats(0, GRID), st.floats(0, GRID), st.integers(1, 10_000), st.integers(1, 10_000))
def test_every_point_of_the_grid_is_a_pixel_of_the_screen(x: float, y: float, width: int, height: int) -> None:
    scaled = convert_to_pixels({"coordinate": [x, y], "start_coordinate": [y, x], "text": "t"}, (width, height))
    for name in ("coordinate", "start_coordinate"):
        assert 0 <= scaled[name][0] < width
        assert 0 <= scaled[name][1] < height
    assert scaled["text"] == "t"


def test_the_middle_of_the_grid_is_the_middle_of_the_screen() -> None:
    assert convert_to_pixels({"coordinate": [500, 500]}, (1366, 768)) == {"coordinate": [683, 384]}


@pytest.mark.parametrize("value", [None, 5, [1], [1, 2, 3], ["a", 1], [True, 1], [float("nan"), 1], "1,2", {}])
def test_what_is_no_coordinate_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="coordinate must be two numbers"):
        convert_to_pixels({"coordinate": value}, (100, 100))
