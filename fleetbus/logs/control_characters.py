r"""Control characters of foreign text shown instead of obeyed: what a model, a tool or a server wrote may hold a terminal's
commands, which set the clipboard, the title or what seems to have been printed before.

Escaped are C0 and C1, DEL, and what changes the direction of text or separates lines; as ``\x1b`` and ``\u202e``. Tabs and
line feeds stay where text has lines. Pure.
"""

import re
from collections.abc import Mapping

_FORMATTING = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_FORMATTING}]")


def escape_control_characters(text: str) -> str:
    """``text`` as a terminal may show it. JSON stays the same JSON: its encoders escape what is below 0x20 themselves."""
    return _CONTROL.sub(_escape, text)


def escape_in_values(value: object) -> object:
    """The same for every text in JSON-like data, keys included; line feeds, too: a value is one line."""
    if isinstance(value, str):
        return escape_control_characters(value).replace("\n", "\\n")
    if isinstance(value, Mapping):
        return {escape_in_values(key): escape_in_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape_in_values(item) for item in value]
    return value


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"
