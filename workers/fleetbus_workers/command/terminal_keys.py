"""Single keys from a terminal, without waiting for Enter and without an echo."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def read_keys() -> Iterator[Callable[[], str]]:
    """A function that returns the keys pressed since it was last called; always empty where standard input is no terminal.

    The terminal is as it was before when the block ends; Ctrl-C still interrupts.
    """
    if not sys.stdin.isatty():
        yield str
        return
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield str
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda: os.read(descriptor, 64).decode(errors="ignore") if select.select([descriptor], [], [], 0)[0] else ""
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
