"""Text that the interpreter itself would print on standard error, as records: for logs that programs read.

Errors of threads, errors that cannot be raised and warnings of Python stand in the JSON log like all else. Set up by the
process of a role; never by a program that merely uses fleetbus. A crash in native code stays what it is.
"""

from __future__ import annotations

import logging
import sys
import threading

import structlog

log = structlog.get_logger()


def log_uncaught() -> None:
    """From now on, to the end of the process."""
    threading.excepthook = _log_of_thread
    sys.unraisablehook = _log_unraisable
    logging.captureWarnings(True)


def _log_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is None or isinstance(failed.exc_value, SystemExit):
        return
    name = failed.thread.name if failed.thread is not None else "unknown"
    log.error("thread crashed", thread=name, reason=describe(failed.exc_value), exc_info=failed.exc_value)


def _log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    error = failed.exc_value
    reason = describe(error) if error is not None else failed.exc_type.__name__
    log.error("error that cannot be raised", where=repr(failed.object)[:200], reason=reason, exc_info=error or False)


def describe(error: BaseException) -> str:
    """One line: of what its tasks met, the first is nearest to the cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        words = str(error)
    except Exception as unreadable:  # noqa: BLE001 - the exceptions of environments are anybody's code
        words = f"(its text cannot be had: {type(unreadable).__name__})"
    return f"{type(error).__name__}: {' '.join(words.split())[:500]}".rstrip(": ")
