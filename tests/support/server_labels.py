"""Labels of servers that are started for an episode, of living workers and of dead ones."""

from __future__ import annotations

import time

from fleetbus_workers.environment.ownership import Labels, build_process_owner

GONE = "somewhere_999999999_1"
"""An owner that is on no machine."""


def labels(*, owner: str | None = None, seconds: int = 600) -> Labels:
    return Labels(run="r1", episode="task 1", owner=owner or build_process_owner(), expires=int(time.time()) + seconds)
