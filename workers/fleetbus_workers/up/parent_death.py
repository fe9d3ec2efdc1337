"""Child processes exit with `fleetbus up`: each holds the read end of a pipe whose write end only `up` holds.

When `up` ends, by whatever means, the kernel closes the pipe and its readers see the end of file. Watched by a thread and not
by the event loop, because a loop that hangs in native code must end too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NoReturn

SECONDS_TO_LEAVE = 5.0
"""What a process gets to stop cleanly once its supervisor is gone."""


def exit_with_parent(descriptor: int = 0, exit_timeout_seconds: float = SECONDS_TO_LEAVE) -> None:
    """From now on: when ``descriptor`` (standard input) reaches its end, SIGTERM this process, and soon after end it hard."""
    watcher = threading.Thread(target=_watch, args=(descriptor, exit_timeout_seconds), name="supervisor watch", daemon=True)
    watcher.start()


def _watch(descriptor: int, exit_timeout_seconds: float) -> NoReturn:
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(exit_timeout_seconds)  # the process is stuck if this returns
    os._exit(1)
