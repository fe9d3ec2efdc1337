"""``fleetbus trace`` of a session that a client of the remote-gym gateway played over a real server, at two workers in turn."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.client.sessions import sessions
from fleetbus.core.episode.journal import Journal
from fleetbus.core.episode.trace_ids import build_call_path, compute_session_trace_id, span_id
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls
from tests.support.gym_service import Wire, new_boundary, running
from tests.support.otlp_receiver import Receiver, spans_in_file
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    running = Receiver()
    yield running
    running.close()


@asynccontextmanager
async def gateway(fleet: SmallDeployment) -> AsyncIterator[Wire]:
    @asynccontextmanager
    async def calls() -> AsyncIterator[GymCalls]:
        async with fleet.connect("gateway-1") as bus, sessions(bus, fleet.subjects) as client:
            yield GymCalls(client, call_seconds=60, max_sessions=0)

    async with running(GymGateway(calls, GymSettings()).application()) as wire:
        yield wire


async def play_session(fleet: SmallDeployment, wire: Wire) -> str:
    """An episode of five turns; a step is repeated as clients do, and the worker is gone after the second."""
    for name in ("environment-1", "environment-2"):
        fleet.environment(name, make=lambda: ScriptedEnvironment(5))
    await fleet.heard(*fleet.members.values())
    session = str((await wire.connect(seed=3))["session_id"])
    boundary = new_boundary()
    first = await wire.call(session, "step", boundary=boundary, action_str="one")
    assert await wire.call(session, "step", boundary=boundary, action_str="one") == first
    await wire.call(session, "step", action_str="two")
    holder = (await read_session_journal(fleet.bus, fleet.subjects, session)).claim
    assert holder is not None
    fleet.members[holder.worker].kill()
    for action in ("three", "four", "five"):
        answer = await wire.call(session, "step", action_str=action)
    assert answer["done"] is True
    await wire.call(session, "close")
    return session


async def run_trace_command(url: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleetbus_workers.cli", "trace", RUN, "--nats", url, "--json", *map(str, arguments)]
    ended = await anyio.run_process(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return dict(json.loads(ended.stdout))


async def test_a_session_through_the_gateway_arrives_as_one_trace_with_what_its_journal_says(
    receiver: Receiver, tmp_path: Path
) -> None:
    file = tmp_path / "spans.jsonl"
    with anyio.fail_after(55):
        async with run_server(tmp_path / "store", monitor_port=None) as server:
            async with small_deployment(
                build_configuration(), connect=lambda name: connect(server.url, run=RUN, worker=name)
            ) as fleet, gateway(fleet) as wire:  # fmt: skip
                session = await play_session(fleet, wire)
                journal = await read_session_journal(fleet.bus, fleet.subjects, session)
            told = await run_trace_command(server.url, "--otlp", receiver.url, "--jsonl", file)
            alone = await run_trace_command(server.url, "--jsonl", os.devnull, "--session", session)
    assert (told["sessions"], told["open_sessions"], told["episodes"]) == (1, 0, 0)
    assert alone["spans"] == told["spans"] == len(receiver.spans)
    assert {span.span_id.hex() for span in receiver.spans} == {span["spanId"] for span in spans_in_file(file)}
    assert set(receiver.services.values()) == {"fleetbus-environment"}
    check_tree(receiver.spans, session)
    check_against_the_journal(receiver.spans, journal, session)


def check_tree(spans: list[Any], session: str) -> None:
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) and {span.trace_id for span in spans} == {
        compute_session_trace_id(RUN, session).to_bytes(16, "big")
    }
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "session" and not root.status.message
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    calls = sorted((span.start_time_unix_nano, span.end_time_unix_nano) for span in spans if span.name == "step")
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(calls)), "one call at a time"


def check_against_the_journal(spans: list[Any], journal: Journal, session: str) -> None:
    named = Counter(span.name for span in spans)
    executed = Counter(record.call.call for record in journal.records)
    assert executed["step"] == 5, "the repeated step was executed once"
    assert named == executed + Counter(session=1, attempt=2, restore=1)
    trace = compute_session_trace_id(RUN, session)
    by_id = {span.span_id: span for span in spans}
    for record in journal.records:
        span = by_id[span_id(trace, build_call_path(record.call.key)).to_bytes(8, "big")]
        attributes = {each.key: each.value for each in span.attributes}
        assert span.name == record.call.call
        assert attributes["fleetbus.worker"].string_value == record.answer.worker
        assert attributes["fleetbus.call.number"].int_value == record.answer.number
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 <= record.seconds + 1e-6
    workers = {record.answer.worker for record in journal.records}
    assert workers == {"environment-1", "environment-2"}
    (root,) = [span for span in spans if span.name == "session"]
    about = {each.key: each.value for each in root.attributes}
    assert about["fleetbus.end.sequence"].int_value == journal.last_sequence
    assert about["fleetbus.session.end"].string_value == "closed"
