"""Values of a server's configuration as text in which what comes up more than once stands once, as a variable. Pure.

nats-server reads a variable where it is used, with the value that it had last: further accounts may take the same names anew.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_REFERENCE, _DEFINITION = len("$A9"), len("A9:\n")
_LETTERS, _SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789abcdefghijklmnopqrstuvwxyz"
"""Names of variables begin with a capital and go on with none: no word of the configuration does."""


def format_sharing(values: Mapping[str, Any]) -> list[str]:
    """A line for each of ``values``, made of maps, lists, texts and numbers; before them a line for each variable."""
    text = _Text()
    for value in values.values():
        text.count_parts(value)
    lines = [f"{name}:{definition}" for name, definition in text.name_parts()]
    return [*lines, *(f"{json.dumps(key)}:{text.shorten(value)}" for key, value in values.items())]


class _Text:
    """The text of values, in full and with variables. A value must not change meanwhile."""

    def __init__(self) -> None:
        self._full: dict[int, str] = {}
        self._counted: Counter[str] = Counter()
        self._parts: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def count_parts(self, value: Any) -> None:
        """Count what a value is made of; what stands in a part that comes up again is counted once."""
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            text = self._format(part)
            self._counted[text] += 1
            if text not in self._parts:
                self._parts[text] = part
                self.count_parts(part)

    def name_parts(self) -> Iterator[tuple[str, str]]:
        """Variables for the parts that are worth one, and what each stands for; those that it is made of stand before it."""
        counted = self._counted.items()
        worth = [text for text, count in counted if (count - 1) * len(text) > count * _REFERENCE + _DEFINITION]
        names = dict(zip(sorted(worth, key=lambda text: -self._counted[text]), _spell_names(), strict=False))
        for text in sorted(worth, key=len):
            yield names[text], self.shorten(self._parts[text])
            self._names[text] = f"${names[text]}"

    def shorten(self, value: Any) -> str:
        """The text with the variables that there are so far."""
        return self._names.get(self._format(value)) or _join(value, self.shorten)

    def _format(self, value: Any) -> str:
        if not isinstance(value, dict | list):
            return json.dumps(value)
        if id(value) not in self._full:
            self._full[id(value)] = _join(value, self._format)
        return self._full[id(value)]


def _spell_names() -> Iterator[str]:
    """Names without end, short ones first."""
    for length in itertools.count():
        for signs in itertools.product(_LETTERS, *([_SIGNS] * length)):
            yield "".join(signs)


def _join(value: Any, form: Callable[[Any], str]) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{_quote(key)}:{form(each)}' for key, each in value.items())}}}"
    return f"[{','.join(map(form, value))}]" if isinstance(value, list) else json.dumps(value)


def _quote(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key)
