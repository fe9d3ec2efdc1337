"""Tables of commands: a row is a line where no terminal breaks it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from rich.table import Table

from fleetbus_workers.cli.output import print_table


def long_table() -> Table:
    table = Table("name", "text", box=None, pad_edge=False)
    table.add_row("a", "word " * 100)
    return table


def test_a_row_is_a_line_in_a_pipe_and_fits_the_width_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    print_table(long_table())
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [2, 101]
    terminal: Any = sys.stdout
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    print_table(long_table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 for line in lines)
