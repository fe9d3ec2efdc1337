"""Values of a server's configuration as text in which what comes up more than once stands once, as a variable. Pure.

nats-server reads a variable where it is used, with the value that it had last: further accounts may take the same names anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

_REFERENCE, _DEFINITION = len("$v99"), len("  v99: \n")


def format_sharing(values: Mapping[str, Any]) -> list[str]:
    """A line for each of ``values``, made of maps, lists, texts and numbers; before them a line for each variable."""
    counted: Counter[str] = Counter()
    parts: dict[str, Any] = {}
    for value in values.values():
        _count_parts(value, counted, parts)
    worth = [text for text, count in counted.items() if (count - 1) * len(text) > count * _REFERENCE + _DEFINITION]
    names: dict[str, str] = {}
    lines = []
    for number, text in enumerate(sorted(worth, key=len)):  # what another one is made of stands before it
        lines.append(f"  v{number}: {_format(parts[text], names)}")
        names[text] = f"$v{number}"
    return [*lines, *(f"  {json.dumps(key)}: {_format(value, names)}" for key, value in values.items())]


def _count_parts(value: Any, counted: Counter[str], parts: dict[str, Any]) -> None:
    """Count what a value is made of, by its text; what stands in a part that comes up again is counted once."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        text = _format(part, {})
        counted[text] += 1
        if text not in parts:
            parts[text] = part
            _count_parts(part, counted, parts)


def _format(value: Any, names: Mapping[str, str]) -> str:
    plain = _format_plain(value, {})
    return names.get(plain) or _format_plain(value, names)


def _format_plain(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_format(each, names)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_format(each, names) for each in value)}]"
    return json.dumps(value)
