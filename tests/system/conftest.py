"""Real servers run on asyncio, as workers do; tests under virtual time say so themselves."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
