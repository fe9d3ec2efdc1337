"""Child processes exit with `fleetbus up`: each holds the read end of a pipe whose write end only `up` holds.

When `up` ends, by any means, the kernel closes the pipe and its readers see the end of file. Watched by a thread and not
by the event loop, because a loop that hangs in native code must end too.
"""

import os
import signal
import threading
import time
from typing import NoReturn

SECONDS_TO_DRAIN = 3.0
"""What a process gets to finish or hand back what it has once its supervisor is gone - and with it, as a rule, the server."""

SECONDS_TO_LEAVE = 7.0
"""What it gets then to stop at once: to release what it holds elsewhere, as instances on a platform that are paid for."""


def exit_with_parent(
    descriptor: int = 0, *, seconds_to_drain: float = SECONDS_TO_DRAIN, exit_timeout_seconds: float = SECONDS_TO_LEAVE
) -> None:
    """From now on: when ``descriptor`` (standard input) reaches its end, SIGTERM this process as a person would, to drain and
    after ``seconds_to_drain`` (0: never) to stop at once; ``exit_timeout_seconds`` later it is ended hard."""
    arguments = (descriptor, seconds_to_drain, exit_timeout_seconds)
    watcher = threading.Thread(target=_watch, args=arguments, name="supervisor watch", daemon=True)
    watcher.start()


def _watch(descriptor: int, seconds_to_drain: float, exit_timeout_seconds: float) -> NoReturn:
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    if seconds_to_drain:
        time.sleep(seconds_to_drain)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(exit_timeout_seconds)  # the process is stuck if this returns
    os._exit(1)
