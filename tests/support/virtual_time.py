"""Tests in virtual time: a module that says ``anyio_backend = virtual_time`` waits for nothing and is repeatable."""

from __future__ import annotations

import pytest
import trio.testing


@pytest.fixture
def virtual_time() -> tuple[str, dict[str, object]]:
    """Trio with a clock that jumps to the next deadline whenever every task waits."""
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
