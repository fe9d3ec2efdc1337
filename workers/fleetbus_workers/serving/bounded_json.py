"""JSON of others, bounded before it is decoded: decoding holds the interpreter, in any thread, so nothing else runs.

A body of 6 MB of ``[],[],...`` becomes two million objects and blocks an event loop for seconds. The number of values is at
most one more than the commas, colons and brackets, which are counted a gigabyte a second.
"""

MAX_VALUES = 1 << 18
"""Values in one document; a screen of 210 x 160 x 3 as lists has 100,000. Decoding so many takes some 20 ms."""

_MARKS = (b",", b"[", b"{", b":")


class TooManyValues(ValueError):
    """A document with more values than anybody honest sends."""


def count_marks(data: bytes) -> int:
    """An upper bound of the values in JSON: what separates or opens them, in texts, too."""
    return sum(data.count(mark) for mark in _MARKS)


def check_values(data: str | bytes) -> None:
    """Raise `TooManyValues` for a document whose decoding could stop the loop."""
    if len(data) <= MAX_VALUES:
        return  # every value takes a character
    encoded = data.encode("utf-8", "replace") if isinstance(data, str) else data
    found = count_marks(encoded)
    if found > MAX_VALUES:
        raise TooManyValues(f"JSON with up to {found} values; at most {MAX_VALUES} are read")
