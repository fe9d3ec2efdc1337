"""Times as formats write them, ISO 8601, and as a log has them, in nanoseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime

LAST_NS = 4 * 10**18
"""Later log times than this, in the year 2096, are no times."""


def format_time(time_ns: int) -> str | None:
    """ISO 8601, in microseconds; None for a time that is unknown."""
    if not 0 < time_ns < LAST_NS:
        return None
    return datetime.fromtimestamp(time_ns // 1000 / 1e6, UTC).isoformat(timespec="microseconds")


def parse_time(text: str | None) -> int:
    """Nanoseconds since 1970; 0 for what is no time. A time without a zone is taken as UTC."""
    try:
        found = datetime.fromisoformat(text or "")
        seconds = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0
    time_ns = round(seconds * 1e6) * 1000
    return time_ns if 0 < time_ns < LAST_NS else 0
