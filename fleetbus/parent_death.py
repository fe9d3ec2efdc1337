"""Commands that end with their parent process: a launcher sets the parent death signal of prctl(2), then executes the command.

On Linux; elsewhere they are ordinary children. The process that counts is the thread that starts them, as in prctl(2).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_LAUNCH = (
    "import ctypes, os, sys; parent, number = map(int, sys.argv[1:3])\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, number, 0, 0, 0)\n"
    "if os.getppid() != parent: os._exit(1)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


def build_parent_death_command(command: Sequence[str], *, sent: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line of a child that gets the signal ``sent`` when this process is no more."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(int(sent)), *command]
