"""Spans in a file: what a kill or a full disk left of a line spoils none that is written later."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from fleetbus_workers.observe.tracing.otlp_file import FileSink
from fleetbus_workers.observe.tracing.span import Span, SpansRefused


@pytest.mark.parametrize("left", [b"", b'{"resourceSpans":[]}\n', b'{"resourceSpans":[]}\n{"resourceSp'])
def test_a_line_that_was_torn_spoils_no_other(tmp_path: Path, left: bytes) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_bytes(left)
    sink = FileSink(file, run="r")
    sink.write([])
    sink.close()
    assert file.read_bytes().startswith(left)
    assert json.loads(file.read_text().splitlines()[-1]) == {"resourceSpans": []}


@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize("room", [0, 1, 150])
def test_spans_that_found_no_room_are_written_once_when_there_is_room_again(tmp_path: Path, size: int, room: int) -> None:
    file = tmp_path / "spans.jsonl"
    sink = FileSink(file, run="r")
    sink.write([build_span(1, size)])
    whole = file.stat().st_size
    with limited_files(whole + room), pytest.raises(SpansRefused, match="cannot be written"):
        sink.write([build_span(2, size)])
    sink.write([build_span(2, size)])
    sink.close()
    ids = [found for line in file.read_text().splitlines() for found in list_span_ids(line)]
    assert ids == ["0000000000000001", "0000000000000002"]


@pytest.mark.parametrize("written", [None, 0])
def test_a_file_that_takes_nothing_is_not_asked_for_ever(written: int | None, tmp_path: Path) -> None:
    class Blocked:
        closed = False

        def write(self, _: bytes) -> int | None:
            return written

    sink = FileSink(tmp_path / "spans.jsonl", run="r")
    sink.close()
    sink._file = cast(Any, Blocked())
    with pytest.raises(SpansRefused, match="takes nothing now"):
        sink.write([])


def test_a_file_without_room_is_closed_without_another_error() -> None:
    sink = FileSink(Path("/dev/full"), run="r")
    with pytest.raises(SpansRefused, match="No space left"):
        sink.write([build_span(1, 10)])
    sink.close()


@contextmanager
def limited_files(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that size: it takes what fits, and then nothing."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def build_span(number: int, size: int) -> Span:
    return Span(
        trace_id=number, span_id=number, name="s", start_ns=1, end_ns=2, sequence=number, role="environment", worker="w",
        attributes={"text": "x" * size},
    )  # fmt: skip


def list_span_ids(line: str) -> list[str]:
    """Those of a line; none of one that is torn."""
    try:
        by_worker = json.loads(line)["resourceSpans"]
    except json.JSONDecodeError:
        return []
    return [span["spanId"] for each in by_worker for scope in each["scopeSpans"] for span in scope["spans"]]
