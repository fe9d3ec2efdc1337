"""A pytest plugin that plants one fault before any test: ``-p tests.support.plant`` with FLEETBUS_PLANT=module:function.

So a test that runs regularly is run as it is, by a process of its own, on code that has the fault.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest

VARIABLE = "FLEETBUS_PLANT"


@pytest.fixture(autouse=True, scope="session")
def planted() -> Iterator[None]:
    """The fault, for the whole session."""
    module, _, name = os.environ[VARIABLE].partition(":")
    with pytest.MonkeyPatch.context() as patch:
        getattr(importlib.import_module(f"tests.support.{module}"), name)(patch)
        yield
