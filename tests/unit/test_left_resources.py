"""Counting what a test leaves behind finds what is left."""

from __future__ import annotations

import os

import pytest

from tests.support import resources


def test_a_descriptor_that_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "LEFT_SECONDS", 0.0)
    opened: list[int] = []
    with pytest.raises(AssertionError, match="left behind: 1 descriptors"), resources.nothing_left_behind():
        opened.append(os.open(os.devnull, os.O_RDONLY))
    os.close(opened.pop())


def test_what_is_closed_in_time_is_not() -> None:
    with resources.nothing_left_behind():
        os.close(os.open(os.devnull, os.O_RDONLY))
