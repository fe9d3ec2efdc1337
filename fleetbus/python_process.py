"""Command lines of processes that fleetbus starts: the working folder shadows no import; a child ends with its parent."""

import os
import signal
import sys
from collections.abc import Sequence


def build_module_command(module: str, *arguments: str) -> list[str]:
    """This interpreter running ``module``. ``-P`` keeps the working folder off the import path: a user's ``random.py`` or
    ``mcp/`` there must not replace the real one. Modules that a user names are looked up in that folder by
    `fleetbus.user_code.load_callable`, after everything that is installed."""
    return [sys.executable, "-P", "-m", module, *arguments]


_LAUNCH = (
    "import ctypes, os, sys; parent, number = map(int, sys.argv[1:3])\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, number, 0, 0, 0)\n"
    "if os.getppid() != parent: os._exit(1)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


def build_parent_death_command(command: Sequence[str], *, sent: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line of a child that gets the signal ``sent`` when this process is no more: a launcher sets the parent death
    signal of prctl(2), then executes ``command``. On Linux; elsewhere it is an ordinary child. The process that counts is the
    thread that starts it."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(int(sent)), *command]
