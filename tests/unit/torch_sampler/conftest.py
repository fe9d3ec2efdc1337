"""The embedded engine on a small model with random weights, which no test writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backends import asyncio_alone
from tests.support.torch_engine import write_model

anyio_backend = asyncio_alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))
