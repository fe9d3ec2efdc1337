"""Views need the rights of a monitor alone: the fold, the server's view, the traces."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.nats.reader import NatsReader
from fleetbus_schemas import EpisodeRequested, Task, encode
from fleetbus_workers.observe.run import run_observer
from fleetbus_workers.observe.run.jetstream import fetch_server_view
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import FileSink
from fleetbus_workers.observe.tracing.run import Tracing
from tests.support.processes import until
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


@pytest.mark.integration
@pytest.mark.parametrize("recent_first", [False, True])
async def test_a_monitors_key_is_enough(
    secured: SecuredServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent_first: bool
) -> None:
    monkeypatch.setattr(run_observer, "RECENT_ENTRIES", 0)
    request = EpisodeRequested(
        episode_id="e1", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default", deadline_ns=1
    )
    state, stop = RunState(steps=1), anyio.Event()
    with anyio.fail_after(50), closing(FileSink(tmp_path / "spans.jsonl", run=TRUST)) as sink:
        tracing = Tracing(TRUST, LogTraces(TRUST), [sink])
        async with secured.connect("learner") as learner:
            await learner.publish(SUBJECTS.task("default", "e1"), encode(request))
        async with secured.connect("monitor") as bus, anyio.create_task_group() as tasks:
            watch = RunObserver(bus, SUBJECTS, state, recent_first=recent_first)
            tasks.start_soon(watch.run)
            tasks.start_soon(tracing.follow, bus, SUBJECTS, stop)
            await until(lambda: watch.state.requested > 0 and watch.is_whole and watch.health.bytes > 0)
            view = await fetch_server_view(bus, TRUST, None)
            assert view.entries and not view.consumers  # their names are a secret
            view = await fetch_server_view(bus, TRUST, secured.server.monitor_url)
            assert {each.kind for each in view.consumers} == {"task", "obs", "act"} and view.pending >= 3
            await until(lambda: tracing.written.open == 1)
            stop.set()
            tasks.cancel_scope.cancel()


async def test_a_reader_that_is_sent_more_than_it_asked_for_acks_nothing_and_misses_nothing(secured: SecuredServer) -> None:
    """A server that restarts may do so; an ack would be a violation, which ends the viewer."""
    subject = SUBJECTS.episode("unasked")
    with anyio.fail_after(50):
        async with secured.connect("learner") as learner, secured.connect("monitor") as bus, bus.read([subject]) as reader:
            await learner.publish(subject, b"one")
            assert (await reader.receive()).payload == b"one"
            assert isinstance(reader, NatsReader)
            reader._pull_requests.asked = 0
            await learner.publish(subject, b"two")
            assert (await reader.receive()).payload == b"two"
            await bus.log_state()  # whatever was sent before has been judged by then
