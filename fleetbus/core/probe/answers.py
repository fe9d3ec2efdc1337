"""Answers as values: when two of them are the same, and others that are wrong for certain but look alike. Pure."""

from __future__ import annotations

import math
import re
import unicodedata

NEAR = 0.05
"""A number that is off by this share is wrong under any tolerance worth having."""

SHORT = 80
"""Characters up to which an answer is a value that can be found in a text; a longer one is a text of its own."""

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_TAGS = re.compile(r"</?[A-Za-z_][\w-]*>|\[done\]", re.IGNORECASE)
_LEAD = re.compile(r"^(?:so )?(?:the )?(?:final )?answer(?: is)?[:\s]+", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKS = "*_`$\"' \t\r\n.,;:!"


def normalize(text: str) -> str:
    """An answer without what is only its dress: boxes, tags, marks, case, thousands separators, a sentence around it."""
    found = unicodedata.normalize("NFKC", text)
    if boxes := _BOX.findall(found):
        found = boxes[-1]
    found = _LEAD.sub("", _TAGS.sub(" ", found).strip(_MARKS)).strip(_MARKS)
    return " ".join(_THOUSANDS.sub("", found).casefold().split())


def find_number(text: str) -> float | None:
    """The finite number that an answer is; None for any other text."""
    try:
        value = float(normalize(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_same(one: str, other: str) -> bool:
    """True if both answers say the same, whatever their dress."""
    left, right = find_number(one), find_number(other)
    if left is not None and right is not None:
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return normalize(one) == normalize(other)


def is_value(answer: str) -> bool:
    """True for an answer that is one short line: a number, a name, a label."""
    return bool(answer.strip()) and len(answer) <= SHORT and "\n" not in answer


def find_near_misses(answer: str) -> list[str]:
    """Wrong answers of the same shape, the nearest first: a number moved up and down, a text with its last digit or word
    replaced."""
    text = answer.strip()
    number = find_number(text)
    if number is not None:
        return _move_number(text, number)
    digits = list(re.finditer(r"\d", text))
    if digits:
        last = digits[-1]
        return [f"{text[: last.start()]}{(int(last.group()) + step) % 10}{text[last.end() :]}" for step in (1, 3)]
    words = text.split()
    if len(words) > 1:
        return [" ".join([*words[:-1], each]) for each in ("nothing", "otherwise")]
    if len(text) == 1 and text.isalpha():
        first = "A" if text.isupper() else "a"
        return [chr(ord(first) + (ord(text) - ord(first) + step) % 4) for step in (1, 2)] if text.isascii() else ["?"]
    return [f"un{text}", f"{text}less"]


def _move_number(text: str, number: float) -> list[str]:
    plain = text.replace(",", "")
    if "." in plain or "e" in plain.casefold():
        places = max(len(plain.partition(".")[2]), 1)
        step = max(abs(number) * NEAR, 2 * 10.0**-places)
        return [f"{number + step:.{places}f}", f"{number - step:.{places}f}"]
    size = max(1, round(abs(number) * NEAR))
    return [str(int(number) + size), str(int(number) - size)]
