"""`q` ends `top`: single keys are read from a terminal, which is as it was afterwards."""

from __future__ import annotations

import os
import pty
import sys
import termios

import pytest

from fleetbus_workers.command.terminal_keys import read_keys


def test_keys_come_without_enter_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "r") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            before = termios.tcgetattr(terminal)
            with read_keys() as keys:
                assert keys() == ""
                os.write(ours, b"q")
                assert keys() == "q" and keys() == ""
            assert termios.tcgetattr(terminal) == before
    finally:
        os.close(ours)


def test_without_a_terminal_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with read_keys() as keys:
            assert keys() == ""
