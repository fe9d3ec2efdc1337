"""Finds the failures of a worker that are the first of their kind: only those carry a traceback, all others are alike."""

from __future__ import annotations

import structlog

from fleetbus_workers.environment.episode.stages import EpisodeEnded
from fleetbus_workers.environment.failure_location import format_traceback

MAX_KINDS = 64
"""Of one worker; failures of further kinds have their error and its location alone."""

log = structlog.get_logger()


class FirstFailures:
    """The kinds of failure that a worker has had: outcome, error class, stage, location."""

    def __init__(self) -> None:
        self._kinds: set[tuple[str, str, str, str]] = set()

    def describe(self, ended: EpisodeEnded) -> str:
        """The traceback of a failure if it is the first of its kind, else empty."""
        kind = (ended.outcome, ended.error_class, ended.error.partition(":")[0][:40], ended.location)
        if kind in self._kinds or len(self._kinds) >= MAX_KINDS:
            return ""
        self._kinds.add(kind)
        text = format_traceback(ended.__cause__) if ended.__cause__ is not None else ""
        log.warning(
            "first failure of its kind",
            outcome=ended.outcome,
            error_class=ended.error_class,
            reason=ended.error,
            location=ended.location,
            traceback=text,
        )
        return text
