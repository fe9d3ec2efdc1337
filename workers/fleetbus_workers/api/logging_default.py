"""Log lines of a run in somebody's program: on standard error from warnings up, unless the program has set up structlog.

The program's own `logging` is left alone, and structlog is as it was when the last run has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from fleetbus.config.settings import LogSettings
from fleetbus.logs import configure_structlog

_lock = threading.Lock()
_runs = 0


@contextmanager
def configure_logs_if_unset(settings: LogSettings) -> Iterator[None]:
    """Set up structlog for the block unless it is set up already."""
    global _runs
    with _lock:
        if not _runs and structlog.is_configured():
            ours = False
        else:
            ours = True
            _runs += 1
            if _runs == 1:
                level = settings.level if settings.level in ("warning", "error") else "warning"
                configure_structlog(LogSettings(level=level, format=settings.format))
    try:
        yield
    finally:
        with _lock:
            if ours:
                _runs -= 1
                if not _runs:
                    structlog.reset_defaults()
