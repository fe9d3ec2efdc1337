"""The versions of a run's workers, in one line where they differ. Pure: below it are heartbeats alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fleetbus_schemas import Heartbeat

SHOWN_NAMES = 3
"""So many workers of a version are named, and so many versions; the others are counted."""

VERSION_CHARACTERS = 40
"""Shown of a version, which is whatever the holder of a worker's key says."""


def describe_versions(beats: Sequence[Heartbeat]) -> str:
    """One line with who has which version and protocol, the newest first; empty if all have the same. A worker of 0.3.0 or
    before tells neither."""
    by_version: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for beat in beats:
        by_version[beat.protocol, beat.version].append(beat.worker)
    if len(by_version) < 2:
        return ""
    parts = [_describe(*key, sorted(workers)) for key, workers in sorted(by_version.items(), reverse=True)]
    return f"versions differ: {_join_some(parts, '; ')}"


def _describe(protocol: int, version: str, workers: list[str]) -> str:
    printable = "".join(character for character in version[:VERSION_CHARACTERS] if character.isprintable())
    what = f"{printable or 'from source'}, protocol {protocol}" if protocol else "0.3.0 or before"
    return f"{what}: {_join_some(workers, ', ')}"


def _join_some(items: list[str], separator: str) -> str:
    """The first of these, and how many more there are."""
    more = len(items) - SHOWN_NAMES
    return f"{separator.join(items[:SHOWN_NAMES])}{f' and {more} more' if more > 0 else ''}"
