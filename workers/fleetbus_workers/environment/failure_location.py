"""Locates a failure in an environment's own code: the place, and the traceback without the worker's frames.

Code of fleetbus, the standard library and installed packages is passed over as long as there is other code to name.
"""

import inspect
import os
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from fleetbus.logs.secret_formats import REDACTED
from fleetbus.recording.redaction import Redactor, find_environment_secrets

ERROR_CHARS = 1000
TRACEBACK_CHARS = 4000
"""A longer traceback loses its middle: its ends say most."""

_HEAD_CHARS = 800
_READ_CHARS = 1 << 16
"""Of each end of a text, this much is looked through for secrets: it may quote megabytes that a server sent."""

_EDGE_CHARS = 1 << 13
"""So much of that is not shown beside what was not looked through: a secret that is cut there is not recognized as one."""

_LIBRARY = str(Path(os.__file__).resolve().parent) + os.sep
"""The standard library: not asked of `sysconfig`, which a thread must not do while another one imports."""
_RUNTIME = frozenset({"anyio", "click", "trio", "outcome", "uvloop", "msgspec", "pytest", "_pytest", "pluggy"})
"""What workers and tests run on: installed packages that hold no environment."""


def locate_error(error: BaseException) -> str:
    """``FILE:LINE in FUNCTION`` of the innermost frame in an environment's own code; empty if the error came from elsewhere."""
    known = getattr(error, "location", "")
    if known:
        return str(known)
    return _choose(_list_frames(error))


def locate_frame(frame: FrameType | None) -> str:
    """The same for code that runs at the moment; ``frame`` is its innermost one."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _choose(frames[::-1])


def locate_method(environment: object, call: str) -> str:
    """The place at which ``call`` of an environment's class is defined; empty for the adapters that ship."""
    return locate_class_method(type(getattr(environment, "implementation", environment)), call)


def locate_class_method(kind: type, call: str) -> str:
    """The same for a class."""
    function = inspect.unwrap(getattr(kind, call, None) or locate_method)
    code = getattr(function, "__code__", None)
    return _choose([(code, code.co_firstlineno)]) if isinstance(code, CodeType) else ""


def format_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the environment's own code on, without secrets, of bounded length."""
    if known := getattr(error, "remote_traceback", ""):
        return clean_traceback(str(known))
    first = next((step for step in _walk(error.__traceback__) if not _is_ours(step.tb_frame.f_code.co_filename)), None)
    lines = traceback.format_exception(type(error), error, first or error.__traceback__)
    return clean_traceback("".join(lines))


def shows_other_code(error: BaseException) -> bool:
    """True if the traceback leads through code that is not the worker's own: else it says nothing to those who wrote that."""
    return bool(getattr(error, "remote_traceback", "") or _choose(_list_frames(error)))


def clean_error(text: str) -> str:
    """An error's text as a result may carry it: without secrets, which a server may quote, encodable, not longer than a reader
    wants."""
    return _clean_beginning(text, 2 * _EDGE_CHARS)[:ERROR_CHARS].encode("utf-8", "replace").decode()


def clean_traceback(text: str) -> str:
    """Any text as a result may carry it: without secrets, encodable, bounded."""
    text = text.rstrip()
    if len(text) <= 2 * _READ_CHARS:
        cleaned = _build_redactor().clean_text(text)
    else:
        cleaned = _clean_beginning(text, _READ_CHARS) + _build_redactor().clean_text(text[-_READ_CHARS:])[_EDGE_CHARS:]
    if len(cleaned) > TRACEBACK_CHARS:
        left = len(cleaned) - TRACEBACK_CHARS
        cleaned = f"{cleaned[:_HEAD_CHARS]}\n[{left} characters left out]\n{cleaned[_HEAD_CHARS + left :]}"
    return cleaned.encode("utf-8", "replace").decode()


def _clean_beginning(text: str, chars: int) -> str:
    """The text without secrets if it has so many characters, else less than so many of it."""
    cleaned = _build_redactor().clean_text(text[:chars])
    return cleaned if len(text) <= chars else cleaned[:-_EDGE_CHARS] or REDACTED


def _list_frames(error: BaseException) -> list[tuple[CodeType, int]]:
    return [(step.tb_frame.f_code, step.tb_lineno) for step in _walk(error.__traceback__)]


def _walk(step: TracebackType | None) -> list[TracebackType]:
    steps = []
    while step is not None:
        steps.append(step)
        step = step.tb_next
    return steps


def _choose(frames: list[tuple[CodeType, int]]) -> str:
    """The innermost frame of an environment's own code, else of an installed package, outermost first given."""
    others = [(code, line) for code, line in frames if not _is_ours(code.co_filename)]
    own = [(code, line) for code, line in others if not _is_installed(code.co_filename)]
    if not own:
        own = [(code, line) for code, line in others if _find_package(code.co_filename) not in ("", *_RUNTIME)]
    if not own:
        return ""
    code, line = own[-1]
    return f"{_shorten(code.co_filename)}:{line} in {code.co_qualname}"


@cache
def _our_folders() -> tuple[str, ...]:
    specs = map(find_spec, ("fleetbus", "fleetbus_workers", "fleetbus_schemas"))
    folders = [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
    return tuple(str(Path(folder).resolve()) + os.sep for folder in folders)


@cache
def _is_ours(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_our_folders())


@cache
def _is_installed(file: str) -> bool:
    """Of the standard library, an installed package, or no file at all."""
    return file.startswith("<") or str(Path(file).resolve()).startswith(_LIBRARY) or bool(_find_package(file))


@cache
def _find_package(file: str) -> str:
    """The installed package that a file belongs to; empty for other files."""
    parts = Path(file).parts
    found = [parts[index + 1] for index, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")]
    return found[-1].removesuffix(".py") if found else ""


def _shorten(file: str) -> str:
    """Relative to the working folder if it is below it, as a person would type it."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


@cache
def _build_redactor() -> Redactor:
    return Redactor(find_environment_secrets(os.environ))
