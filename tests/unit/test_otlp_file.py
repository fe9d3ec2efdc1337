"""Spans in a file: what a kill or a full disk left of a line spoils none that is written later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbus_workers.observe.tracing.otlp_file import FileSink


@pytest.mark.parametrize("left", [b"", b'{"resourceSpans":[]}\n', b'{"resourceSpans":[]}\n{"resourceSp'])
def test_a_line_that_was_torn_spoils_no_other(tmp_path: Path, left: bytes) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_bytes(left)
    sink = FileSink(file, run="r")
    sink.write([])
    sink.close()
    assert file.read_bytes().startswith(left)
    assert json.loads(file.read_text().splitlines()[-1]) == {"resourceSpans": []}
