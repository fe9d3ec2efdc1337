"""Event loops for tests: a module or a conftest.py that says ``anyio_backend = asyncio_alone`` runs its tests on asyncio alone.

Without it tests run on asyncio and on trio; `tests.support.virtual_time` is trio with a clock that jumps.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def asyncio_alone() -> str:
    """For what runs on asyncio in production too, such as servers and processes, or computes and waits for little."""
    return "asyncio"


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def asyncio_and_trio(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def asyncio_and_slow_trio(request: pytest.FixtureRequest) -> str:
    """For tests each of which starts processes."""
    return str(request.param)
