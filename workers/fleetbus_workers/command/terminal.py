"""Prints text of commands: control characters in it are shown, not obeyed, whoever wrote the text.

`escape_output` replaces standard output and standard error for the length of a command, so that no command has to remember it.
Rich writes a terminal's commands of its own: its consoles are made by `open_console`, which escapes the text and keeps those.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from fleetbus.logs.control_characters import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console


class EscapingStream:
    """A text stream that escapes what is written to it. ``unescaped`` is the stream below, for what escapes by itself."""

    def __init__(self, stream: TextIO, *, keep_carriage_return: bool = False) -> None:
        self.unescaped = stream
        self._keep_carriage_return = keep_carriage_return

    def write(self, text: str) -> int:
        if self._keep_carriage_return:  # lines that count on standard error begin with one
            head = "\r" if text.startswith("\r") else ""
            tail = "\r" if len(text) > 1 and text.endswith("\r") else ""
            middle = text[len(head) : len(text) - len(tail)]
            self.unescaped.write(head + escape_control_characters(middle) + tail)
        else:
            self.unescaped.write(escape_control_characters(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.unescaped, name)


@contextmanager
def escape_output() -> Iterator[None]:
    """Escape what is printed inside the block, also what standard output cannot encode, as lone surrogates."""
    output, errors = sys.stdout, sys.stderr
    handler = output.errors if isinstance(output, io.TextIOWrapper) else None
    if isinstance(output, io.TextIOWrapper):
        output.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = EscapingStream(output), EscapingStream(errors, keep_carriage_return=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output, errors
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors=handler)


def get_unescaped(stream: TextIO) -> TextIO:
    """The stream below an escaping one, else the stream itself."""
    return getattr(stream, "unescaped", stream)


def open_console(stream: TextIO | None = None, **options: Any) -> Console:
    """A Rich console on ``stream`` (standard output unless given) whose text is escaped, and is no markup of Rich's: names and
    errors of others may have square brackets."""
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Any:
            for segment in super().render(*arguments, **options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(escape_control_characters(segment.text), segment.style)

    return EscapingConsole(file=get_unescaped(stream or sys.stdout), markup=False, emoji=False, **options)
