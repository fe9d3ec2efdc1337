"""Structured logs of one process: lines for people or JSON, on standard error or in a file, without secrets.

Set up once per process with `configure_logs`; what `structlog.contextvars` binds travels along with the
task. Log calls take an event and keywords, never a formatted sentence.
"""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TextIO

import structlog

from fleetbus.config.load import strip_credentials
from fleetbus.config.settings import LogSettings
from fleetbus.logs.control_characters import escape_control_characters, escape_in_values
from fleetbus.logs.repeated import RepeatedWarnings
from fleetbus.logs.secret_formats import REDACTED, redact_command, redact_formats
from fleetbus.logs.trace_context import add_trace_ids, drop_trace_parts

SECRET_WORDS = (
    "api_key",
    "apikey",
    "authorization",
    "cookie",
    "credential",
    "password",
    "passwd",
    "private_key",
    "secret",
    "seed",
)
"""A key that contains one of these, or ends in ``token``, names a secret if its value is text."""

Processors = list[structlog.typing.Processor]

_lock = threading.Lock()
_blocks = 0


def configure_logs(settings: LogSettings, *, stream: TextIO | None = None, **bound_values: object) -> None:
    """Log to ``stream`` (standard error unless given); ``bound_values`` (run, role, worker) stand in every line.

    Colours only on a terminal. Libraries that use `logging` come out in the same format, from warnings up.
    """
    target = _unescape(stream or sys.stderr)
    context, rendering = configure_structlog(settings, target)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound_values)
    _configure_libraries(target, [*context, structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name], rendering)


def configure_structlog(settings: LogSettings, stream: TextIO | None = None) -> tuple[Processors, Processors]:
    """Our own log lines alone; `logging` stays as it is. Returns the processors before the level, and those that render."""
    target = _unescape(stream or sys.stderr)
    rendering = _build_renderers(settings, colours=target.isatty())
    context: Processors = [structlog.contextvars.merge_contextvars, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[RepeatedWarnings().process, *context, structlog.processors.add_log_level, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
        logger_factory=structlog.WriteLoggerFactory(target),  # a line at once: other threads write, too
        cache_logger_on_first_use=False,
    )
    return context, rendering


def _unescape(stream: TextIO) -> TextIO:
    """The stream below one that escapes: lines have colours, and their text is escaped here."""
    below: TextIO = getattr(stream, "unescaped", stream)
    return below


def _build_renderers(settings: LogSettings, *, colours: bool) -> Processors:
    """Exceptions become text before secrets are redacted, so that theirs are too; locals are never shown."""
    if settings.format == "json":
        exceptions = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
        return [add_trace_ids, exceptions, redact_event, structlog.processors.JSONRenderer(default=repr)]
    console = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    return [drop_trace_parts, structlog.processors.format_exc_info, redact_event, escape_event, console]


def _configure_libraries(target: TextIO, context: Processors, rendering: Processors) -> None:
    handler = logging.StreamHandler(target)
    handler.addFilter(RepeatedWarnings())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=context,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def redact_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, object]:
    """A structlog processor: values of secret keys, credentials in URLs and nkey seeds become ``[redacted]``, at any depth."""
    return {key: _clean(key, value) for key, value in event.items()}


def escape_event(_logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """A structlog processor for lines that a terminal shows: no value can give it commands or look like a line of its own."""
    tracebacks = {"exception", "stack"}
    return {
        key: escape_control_characters(str(value)) if key in tracebacks else escape_in_values(value)
        for key, value in event.items()
    }


def _clean(key: str, value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _clean(str(name), item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(key, item) for item in value]
    if isinstance(value, bytes):
        return REDACTED if _is_secret(key) else value
    if not isinstance(value, str):
        return value
    if _is_secret(key) and value:
        return REDACTED
    return _clean_text(redact_command(value) if key in COMMANDS else value)


COMMANDS = frozenset({"command", "environment", "spec"})
"""Keys whose text may be a command line, in which variables are set."""


def _is_secret(key: str) -> bool:
    lowered = key.lower().replace("-", "_")
    return lowered.endswith("token") or any(word in lowered for word in SECRET_WORDS)


def _clean_text(text: str) -> str:
    return redact_formats(strip_credentials(text) if "://" in text else text)


@contextmanager
def suppress_logs() -> Iterator[None]:
    """Only critical log lines for the length of the block."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def configure_logs_if_unset(settings: LogSettings) -> Iterator[None]:
    """Set up structlog for the block unless the program has: on standard error, from warnings up. Its own `logging` is left
    alone, and structlog is as it was when the last such block has ended."""
    global _blocks
    with _lock:
        if not _blocks and structlog.is_configured():
            ours = False
        else:
            ours = True
            _blocks += 1
            if _blocks == 1:
                level = settings.level if settings.level in ("warning", "error") else "warning"
                configure_structlog(LogSettings(level=level, format=settings.format))
    try:
        yield
    finally:
        with _lock:
            if ours:
                _blocks -= 1
                if not _blocks:
                    structlog.reset_defaults()
