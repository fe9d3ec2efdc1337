"""Fixtures of the torch trainer's tests: one thread of torch, whose sums depend on their number, and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trainable_model import limit_to_one_thread, make_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with limit_to_one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
