"""The pytest plugin that fleetbus installs: servers and buses, recordings and their replay, a scripted policy, virtual time.

It is loaded in every pytest run where fleetbus is installed, so nothing is imported before a fixture is used. All
fixtures are plain (no event loop): those that need one take a coroutine function or are context managers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.bus.nats.server import NatsServerProcess
    from fleetbus.recording import Recording
    from fleetbus_workers.inference.canned import CannedSampler
    from fleetbus_workers.replay import Report

T = TypeVar("T")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServerProcess]:
    """A running nats-server with JetStream on a free port of the loopback, for the whole session; ``.url`` is its address."""
    from anyio.from_thread import start_blocking_portal

    from fleetbus.bus.nats.server import run_server

    store = tmp_path_factory.mktemp("nats-server")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as server:
        yield server


@pytest.fixture
def memory_bus() -> Callable[..., AbstractAsyncContextManager[Bus]]:
    """``async with memory_bus("run") as bus``: a declared run on an in-memory server of its own."""
    from fleetbus_workers.replay.fixtures import memory_bus as open_bus

    return open_bus


@pytest.fixture
def recording(request: pytest.FixtureRequest) -> Callable[[str | Path], Recording]:
    """``recording(FILE)``: a recording in memory; relative paths begin at the test file's folder."""
    from fleetbus.recording import load_recording

    folder = request.path.parent
    return lambda file: load_recording(folder / file)


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """``replay(FILE, environment=MyEnvironment)``: play a recording against one worker and fail on the first difference.

    ``role`` is environment (default), inference or learner; further arguments are those of `fleetbus_workers.replay.Replay`.
    Returns the
    report; with ``check=False`` also if it differs. Relative paths begin at the test file's folder.
    """
    from fleetbus_workers.replay.fixtures import replay_blocking

    folder = request.path.parent

    def play(file: str | Path | Recording, *, check: bool = True, **choices: object) -> Report:
        report = replay_blocking(folder / file if isinstance(file, (str, Path)) else file, **choices)
        if check:
            report.check()
        return report

    return play


@pytest.fixture
def scripted_sampler() -> Callable[..., CannedSampler]:
    """``scripted_sampler("first answer", "second <done>")``: a policy that answers with these texts, turn after turn in each
    episode.

    Its ``template`` is the one to go with it.
    """
    from fleetbus_workers.inference.canned import CannedSampler

    return CannedSampler


@pytest.fixture
def virtual_clock() -> Callable[..., object]:
    """``virtual_clock(coroutine_function)``: run it on trio where waiting takes no time; the same ``seed``, the same order.

    Needs ``pip install 'fleetbus[simulation]'``; the test is skipped without it.
    """
    pytest.importorskip("trio")
    from fleetbus_workers.virtual_time import run_deterministically

    def run(function: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
        return run_deterministically(function, seed=seed)

    return run
