"""Writes the API reference and the snapshot of the public names from the code: ``python docs/reference/build_api.py``.

`docs/reference/api.md` has the docstrings, `docs/reference/public_names.txt` names, signatures, fields and stability: a change
of that file in a commit is a change of the public API. A test checks that both are current.
"""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import msgspec

import fleetbus

FOLDER = Path(__file__).parent
REFERENCE, SNAPSHOT = FOLDER / "api.md", FOLDER / "public_names.txt"

HEAD = """# API reference

Generated from docstrings by `python docs/reference/build_api.py`; how to use it stands in [docs/api.md](../api.md).
**stable**: stays until 1.0, though more may be added; **provisional**: may change in any release, with a line in CHANGELOG.md.
Modules that are not named here are internal.
"""


def build_reference() -> str:
    """The text of `api.md`."""
    parts = [HEAD]
    for name, (_, stability) in fleetbus._PUBLIC.items():
        parts.append(f"## `{name}` ({stability})\n")
        if name == "__version__":
            parts.append("The version of the installed package, as text.\n")
            continue
        value = getattr(fleetbus, name)
        if not isinstance(value, types.ModuleType):
            parts.append(f"```python\n{describe(name, value)}\n```\n")
        parts.append(f"{_format_docstring(value)}\n")
        for member, found in _list_members(name, value):
            parts.append(f"- `{describe(member, found)}`: {_format_summary(found)}" if _format_summary(found) else "")
        parts.append("")
    return "\n".join(parts).rstrip().replace("\n\n\n", "\n\n") + "\n"


def build_snapshot() -> str:
    """One line per public name and member: stability, name, signature or fields."""
    lines = []
    for name, (_, stability) in sorted(fleetbus._PUBLIC.items()):
        if name == "__version__":
            lines.append(f"{stability} __version__: str")
            continue
        value = getattr(fleetbus, name)
        lines.append(f"{stability} {describe(name, value)}")
        lines += [f"    {describe(member, found)}" for member, found in _list_members(name, value)]
    return "\n".join(lines) + "\n"


def describe(name: str, value: Any) -> str:
    """Name with signature, or with fields and defaults."""
    if isinstance(value, types.ModuleType):
        return f"{name} (module)"
    if isinstance(value, property):
        return f"{name} -> {_get_return(value.fget)}"
    if isinstance(value, type) and issubclass(value, msgspec.Struct):
        return f"{name}({', '.join(_format_field(value, field) for field in msgspec.structs.fields(value))})"
    if getattr(value, "_is_protocol", False):
        return name
    try:
        signature = str(inspect.signature(value))
    except ValueError:
        return name
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)  # annotations are text
    signature = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", signature)
    is_async = inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    return f"{'async ' if is_async else ''}{name}{signature}"


def _format_field(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> str:
    annotation = next(own[field.name] for base in kind.__mro__ if field.name in (own := inspect.get_annotations(base)))
    if field.required:
        return f"{field.name}: {annotation}"
    if field.default is not msgspec.NODEFAULT:
        return f"{field.name}: {annotation} = {field.default!r}"
    return f"{field.name}: {annotation} = {getattr(field.default_factory, '__name__', '...')}()"


def _list_members(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, types.ModuleType):
        return [(member, getattr(value, member)) for member in value.__all__]
    if not isinstance(value, type):
        return []
    found = {key: member for key, member in vars(value).items() if not key.startswith("_")}
    return [(key, member) for key, member in found.items() if isinstance(member, types.FunctionType | property)]


def _get_return(function: Any) -> str:
    return str(inspect.signature(function).return_annotation).replace("'", "")


def _format_docstring(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _format_summary(value: Any) -> str:
    return " ".join(_format_docstring(value).split("\n\n")[0].split())


if __name__ == "__main__":
    REFERENCE.write_text(build_reference(), encoding="utf-8")
    SNAPSHOT.write_text(build_snapshot(), encoding="utf-8")
