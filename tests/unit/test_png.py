"""PNG files of our own: Pillow reads every pixel back, at all sizes; where more than pixels is to be kept, Pillow writes."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from fleetbus_workers.environment.images.png import encode_png, encode_rgb_png


def read(data: bytes) -> Any:
    with Pillow.open(io.BytesIO(data)) as image:
        image.load()
        assert image.format == "PNG"
        return image


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1 << 32))
def test_every_pixel_is_read_back(width: int, height: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = read(encode_png(Pillow.fromarray(pixels)))
    assert (image.mode, image.size) == ("RGB", (width, height))
    assert np.array_equal(np.asarray(image), pixels)


def test_pixels_that_do_not_lie_in_a_row_are_read_back() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    for shown in (pixels[::-1], pixels[:, ::2], pixels.transpose(1, 0, 2), pixels[..., ::-1], pixels[:1, :1]):
        assert np.array_equal(np.asarray(read(encode_rgb_png(shown))), shown)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16"])
def test_other_modes_are_kept(mode: str) -> None:
    image = Pillow.new(mode, (5, 4), 1)
    again = read(encode_png(image))
    assert again.mode == mode
    assert again.tobytes() == image.tobytes()


def test_transparency_is_kept() -> None:
    image = Pillow.new("RGB", (5, 4), (1, 2, 3))
    image.info["transparency"] = (1, 2, 3)
    assert read(encode_png(image)).info["transparency"] == (1, 2, 3)


def test_without_numpy_the_pixels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Pillow.linear_gradient("L").convert("RGB")
    own = encode_png(image)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert read(encode_png(image)).tobytes() == read(own).tobytes()
