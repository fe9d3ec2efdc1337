"""Property tests draw the same examples in every run, so that a run that passed here passes elsewhere.

``HYPOTHESIS_PROFILE=explore`` draws new ones each time, and more of them. Byte code is kept even where the shell says
otherwise: without it each of some thousand processes compiles the packages again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that a test calls in this process sets up logs for a stream that ends with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
        root.handlers[:], root.level = handlers, level


def pytest_sessionstart() -> None:
    """Where nothing isolates, verifiers of tests run with the limits that there are: these are no foreign code."""
    from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, require_isolation
    from fleetbus_workers.environment.isolation.verifier import Verifier

    try:
        require_isolation()
    except IsolationUnavailable:
        os.environ.setdefault("FLEETBUS_ENVIRONMENT_SANDBOX", "limits")
        assert Verifier.__init__.__kwdefaults__ is not None
        Verifier.__init__.__kwdefaults__["sandbox"] = "limits"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is a KeyboardInterrupt here: where a shell runs the tests in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no process is left with it at the end."""
    items.sort(key=lambda item: item.name != "test_ten_seeds_keep_all_invariants")
