"""The endpoint of agents is served by uvicorn, which knows asyncio alone; so do all workers in production."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
