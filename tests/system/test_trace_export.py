"""``fleetbus trace``: spans arrive at a real OTLP/HTTP receiver, by the official exporter, once; and in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import FileSink
from fleetbus_workers.observe.tracing.run import Tracing
from fleetbus_workers.observe.tracing.span import SpansRefused
from tests.support.otlp_receiver import Receiver, spans_in_file
from tests.support.processes import until, wait_for_output
from tests.support.servers import connect, run_server

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
GUESSING = ROOT / "tests" / "replay" / "recordings" / "guessing.fbrec"
RUN = "small"
ENTRIES, SPANS = len(load_recording(GUESSING).entries), 458


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    running = Receiver()
    yield running
    running.close()


def read_stdout(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    found = run_program([str(each) for each in arguments])
    captured = capsys.readouterr()
    assert found == code, captured
    return captured.out if code == 0 else captured.err


def test_a_receiver_gets_the_same_spans_that_the_file_has(receiver: Receiver, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "spans.jsonl"
    told = json.loads(read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url, "--jsonl", file, "--json"))
    counted = {"episodes": 33, "open": 0, "sessions": 0, "open_sessions": 0, "spans": SPANS}
    assert told == {"run": RUN, "last_sequence": 248} | counted
    written = {span["spanId"]: span for span in spans_in_file(file)}
    assert len(receiver.spans) == len(written) == SPANS
    for span in receiver.spans:
        twin = written[span.span_id.hex()]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (twin["traceId"], twin.get("parentSpanId", ""))
        assert (span.name, span.start_time_unix_nano) == (twin["name"], int(twin["startTimeUnixNano"]))
        assert span.end_time_unix_nano == int(twin["endTimeUnixNano"])
        assert [link.span_id.hex() for link in span.links] == [link["spanId"] for link in twin.get("links", ())]
        assert {each.key: value_of(each.value) for each in span.attributes} == {
            each["key"]: value_in_file(each["value"]) for each in twin["attributes"]
        }
    generated = next(span for span in receiver.spans if span.name == "generate")
    assert receiver.services[generated.span_id] == "fleetbus-inference"
    assert set(receiver.services.values()) == {"fleetbus-environment", "fleetbus-inference", "fleetbus-learner"}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def value_in_file(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [value_in_file(each) for each in content["values"]]
    return int(content) if kind == "intValue" else content


def test_the_protocols_own_json_parser_reads_the_file(tmp_path: Path, capsys: Any) -> None:
    parser = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    file = tmp_path / "spans.jsonl"
    read_stdout(capsys, "trace", GUESSING, "--jsonl", file)
    parsed = [parser.Parse(line, service.ExportTraceServiceRequest()) for line in file.read_text().splitlines()]
    assert sum(len(scope.spans) for each in parsed for of in each.resource_spans for scope in of.scope_spans) == SPANS


def test_exporting_again_brings_no_new_spans_and_going_on_brings_only_the_rest(receiver: Receiver, capsys: Any) -> None:
    read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url)
    first = {span.span_id for span in receiver.spans}
    read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url)
    assert {span.span_id for span in receiver.spans} == first
    receiver.spans.clear()
    rest = json.loads(read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url, "--after", 200, "--json"))
    assert 0 < len(receiver.spans) == rest["spans"] < SPANS
    assert {span.span_id for span in receiver.spans} < first
    nothing = json.loads(
        read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url, "--after", rest["last_sequence"], "--json")
    )
    assert nothing["spans"] == 0


def test_a_receiver_that_is_busy_is_asked_again(receiver: Receiver, capsys: Any) -> None:
    receiver.answers = [503]
    read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url)
    assert len(receiver.spans) == SPANS


def test_keys_travel_in_headers_that_the_command_line_does_not_show(
    receiver: Receiver, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=k1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")  # is for what runs, not for what is read
    read_stdout(capsys, "trace", GUESSING, "--otlp", f"{receiver.url}/v1/traces", "--episode", "l1-start-0000")
    assert receiver.headers[0]["x-api-key"] == "k1"
    assert len({span.trace_id for span in receiver.spans}) == 1


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://localhost", "http://"])
def test_what_is_no_address_of_a_receiver_is_one_line(url: str, capsys: Any) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert "not the URL of a receiver" in read_stdout(capsys, "trace", GUESSING, "--otlp", url, code=2)


def test_a_receiver_that_refuses_or_is_not_there_is_one_line(
    receiver: Receiver, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers = [401]
    assert "does not take spans" in read_stdout(capsys, "trace", GUESSING, "--otlp", receiver.url, code=2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2.5")
    complaint = read_stdout(capsys, "trace", GUESSING, "--otlp", "http://127.0.0.1:1", code=2)
    assert complaint == "fleetbus: http://127.0.0.1:1/v1/traces does not take spans: Connection refused\n"


def test_without_the_exporter_the_command_says_what_to_install(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "fleetbus_workers.observe.tracing.otlp", raising=False)
    assert "pip install 'fleetbus[otel]'" in read_stdout(capsys, "trace", GUESSING, "--otlp", "http://127.0.0.1:1", code=2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give --otlp URL or --jsonl FILE"),
        (("--jsonl", "f", "--follow"), "leave out the recording"),
        (("--jsonl", "f", "--follow", "--session", "s"), "leave out the recording, --archive, --episode or --session"),
        (("--jsonl", os.devnull, "--session", "a.b"), "session 'a.b' must be"),
        (("--jsonl", "no/such/folder/f"), "cannot be written"),
        (("--jsonl", os.devnull, "--episode", "a.b"), "episode 'a.b' must be"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], complaint: str, capsys: Any) -> None:
    assert complaint in read_stdout(capsys, "trace", GUESSING, *arguments, code=2)


async def fill(bus: Bus, start: int, stop: int) -> None:
    for entry in load_recording(GUESSING).entries[start:stop]:
        await bus.publish(entry.subject, entry.payload)


async def test_messages_are_exported_by_choice_and_without_secrets(tmp_path: Path) -> None:
    subjects = Subjects(RUN)
    request = EpisodeRequested(
        episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default", deadline_ns=1
    )
    observation = Observation(
        episode_id="e", attempt=1, turn=0, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=1,
        messages=(ChatMessage(role="user", content="Log in with password=hunter2hunter2 please"),),
    )  # fmt: skip
    said = [
        (subjects.task("default", "e"), request),
        (subjects.episode("e"), AttemptStarted(episode_id="e", attempt=1, worker="env", nonce="n", lane="e0")),
        (subjects.observation("default", "any", "e"), observation),
        (subjects.action("e0", "e"), Action(episode_id="e", attempt=1, turn=0, text="I use Bearer abcdefgh-ijklmnop now")),
    ]
    files = {content: tmp_path / f"{content}.jsonl" for content in (True, False)}
    for content, file in files.items():
        sink = FileSink(file, run=RUN)
        async with MemoryServer().connect(RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=2))
            for subject, message in said:
                await bus.publish(subject, encode(message))
            await Tracing(RUN, LogTraces(RUN, content=content), [sink]).copy(bus.scan([subjects.log]))
        sink.close()
    assert "please" in files[True].read_text() and "I use" in files[True].read_text()
    assert "please" not in files[False].read_text() and "I use" not in files[False].read_text()
    assert "hunter2" not in files[True].read_text() and "abcdefgh-ijklmnop" not in files[True].read_text()


def test_the_command_exports_messages_only_when_it_is_asked_to(tmp_path: Path, capsys: Any) -> None:
    silent, telling = tmp_path / "silent.jsonl", tmp_path / "telling.jsonl"
    read_stdout(capsys, "trace", GUESSING, "--jsonl", silent)
    read_stdout(capsys, "trace", GUESSING, "--jsonl", telling, "--content")
    assert "gen_ai.input.messages" in telling.read_text() and "messages" not in silent.read_text()


async def test_an_error_that_quotes_a_secret_reaches_nobody(tmp_path: Path) -> None:
    subjects, file = Subjects(RUN), tmp_path / "spans.jsonl"
    request = EpisodeRequested(
        episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default", deadline_ns=1
    )
    claim = AttemptStarted(episode_id="e", attempt=1, worker="env", nonce="n", lane="e0")
    result = EpisodeFinished(
        episode_id="e", group_id="g", attempt=1, outcome="env_failed", worker="env", error_class="HTTPError",
        error="401 for Authorization: Bearer abcdefgh-ijklmnop at https://me:hunter2hunter2@host/",
    )  # fmt: skip
    sink = FileSink(file, run=RUN)
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=2))
        await bus.publish(subjects.task("default", "e"), encode(request))
        await bus.publish(subjects.episode("e"), encode(claim))
        await bus.publish(subjects.episode("e"), encode(result))
        await Tracing(RUN, LogTraces(RUN), [sink]).copy(bus.scan([subjects.log]))
    sink.close()
    text = file.read_text()
    assert "401 for Authorization" in text and "HTTPError" in text
    assert "abcdefgh-ijklmnop" not in text and "hunter2" not in text


class Hesitant(FileSink):
    """Takes the first batch, refuses two, then takes all."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, run=RUN)
        self.asked = 0

    def write(self, spans: Any) -> None:
        self.asked += 1
        if self.asked in (2, 3):
            raise SpansRefused("not now")
        super().write(spans)


async def test_a_log_that_grows_is_followed_and_a_receiver_that_was_away_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.tracing.run.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("fleetbus_workers.observe.tracing.run.FLUSH_SECONDS", 0.01)
    file, stop = tmp_path / "spans.jsonl", anyio.Event()
    sink = Hesitant(file)
    async with MemoryServer().connect(RUN) as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run(RUN, lanes=2))
        tracing = Tracing(RUN, LogTraces(RUN), [sink])
        tasks.start_soon(tracing.follow, bus, Subjects(RUN), stop)
        await fill(bus, 0, 150)
        await until(lambda: tracing.written.last_sequence == 150)
        await fill(bus, 150, ENTRIES)
        await until(lambda: tracing.written.last_sequence == ENTRIES)
        stop.set()
    sink.close()
    ids = [span["spanId"] for span in spans_in_file(file)]
    assert len(ids) == len(set(ids)) == SPANS == tracing.written.spans
    assert sink.asked > 3 and tracing.written.open == 0


async def test_a_receiver_that_never_took_anything_ends_the_following(tmp_path: Path) -> None:
    sink = Hesitant(tmp_path / "spans.jsonl")
    sink.asked = 1
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=2))
        await fill(bus, 0, 150)
        with pytest.raises(ExceptionGroup) as raised:
            await Tracing(RUN, LogTraces(RUN), [sink]).follow(bus, Subjects(RUN), anyio.Event())
    assert raised.group_contains(SpansRefused, match="not now")
    sink.close()


class Slow(FileSink):
    """Says that it was asked, and writes when it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, run=RUN)
        self.asked, self.may_write = threading.Event(), threading.Event()

    def write(self, spans: Any) -> None:
        self.asked.set()
        assert self.may_write.wait(10)
        super().write(spans)


async def test_a_file_that_is_closed_while_the_following_is_cancelled_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    sink = Slow(file)
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=2))
        await fill(bus, 0, 150)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Tracing(RUN, LogTraces(RUN), [sink]).follow, bus, Subjects(RUN), anyio.Event())
            await until(sink.asked.is_set)
            tasks.cancel_scope.cancel()
            sink.close()
            sink.may_write.set()
    assert file.read_bytes() == b""


def test_closing_a_file_waits_for_the_line_that_is_being_written(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    sink = FileSink(file, run=RUN)
    writing, may_go_on = threading.Event(), threading.Event()
    real = sink._file

    class Held:
        """A file that stops before it says what it has written."""

        name, closed = real.name, False

        def write(self, line: bytes) -> int:
            written = real.write(line)
            writing.set()
            assert may_go_on.wait(10)
            return written

        def close(self) -> None:
            real.close()

    sink._file = cast(Any, Held())
    spans = [span for entry in load_recording(GUESSING).entries for span in LogTraces(RUN).add(entry)]
    with ThreadPoolExecutor() as threads:
        written = threads.submit(sink.write, spans)
        assert writing.wait(10)
        closed = threads.submit(sink.close)
        with pytest.raises(TimeoutError):
            closed.result(0.05)
        may_go_on.set()
        written.result(10)
        closed.result(10)
    assert file.read_bytes().endswith(b"\n") and real.closed


async def test_the_command_follows_a_real_log_until_it_is_told_to_stop(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    async with run_server(tmp_path / "store") as server, connect(server.url, run=RUN, role="test") as bus:
        await bus.declare(plan_run(RUN, lanes=2, max_bytes=0))
        await fill(bus, 0, 100)
        command = [
            sys.executable,
            "-m",
            "fleetbus_workers.cli",
            "trace",
            RUN,
            "--nats",
            server.url,
            "--jsonl",
            str(file),
            "--follow",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        async with await anyio.open_process(command, cwd=tmp_path, stderr=subprocess.STDOUT, env=environment) as process:
            await until(lambda: file.exists() and file.stat().st_size > 0)
            await fill(bus, 100, ENTRIES)
            await until(lambda: len(spans_in_file(file)) == SPANS)
            process.send_signal(signal.SIGTERM)
            await wait_for_output(process.stdout, b"continues from here)")
            assert await process.wait() == 0
