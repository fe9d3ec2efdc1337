"""Text of others in what commands print: escaped where a terminal or an encoding cannot take it."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest

from fleetbus_workers.cli.output import print_json
from fleetbus_workers.command.terminal import escape_output, open_console


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\\ud800 ─"), ("latin-1", "\\ud800 \\u2500")])
def test_what_an_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    with escape_output():
        print("\ud800 ─")
        open_console().print("\ud800 ─")
    output.flush()
    assert output.buffer.getvalue().decode(encoding).splitlines() == [shown, shown]  # type: ignore[attr-defined]
    assert output.errors == "strict", "it is as it was afterwards"


def test_a_lone_surrogate_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"said": "bad \ud800", "more": [1]})
    assert msgspec.json.decode(capsys.readouterr().out.replace("ud800", "u0041")) == {"said": "bad A", "more": [1]}
