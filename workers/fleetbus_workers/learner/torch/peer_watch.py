"""Ends this process at once when another of those that share its model is gone.

A collective on GPUs does not notice that a process on the same machine died: the others would stand in it until its time is
over, and so would the launcher, which waits for them. Each process therefore listens to its neighbour in a thread, over TCP;
one that is gone without a word ends it, and so round the ring. The launcher then starts all of them again.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist

from fleetbus_workers.exit_status import CRASHED

LAST_WORDS_SECONDS = 5.0
"""What the leader gets to end by itself and say why: what ends a process often ends all of them, and it alone is read."""

log = structlog.get_logger()


class PeerWatch:
    """Watches from when it is made until `close`; every process has to make one. ``limit`` is longer than any run."""

    def __init__(self, limit: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=limit)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._listen, name="peer-watch", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        neighbour = (self._rank + 1) % self._world
        try:
            dist.recv(torch.zeros(1), src=neighbour, group=self._group)
        except RuntimeError as error:
            log.error("process of the shared model is gone; ending this one too", process=neighbour, reason=str(error)[:200])
            if self._rank == 0:
                time.sleep(LAST_WORDS_SECONDS)
            os._exit(CRASHED)  # the other threads may stand in a collective that nothing ends

    def close(self) -> None:
        """Take leave of who listens here, and wait for the neighbour's leave. Every process has to call it."""
        dist.send(torch.ones(1), dst=(self._rank - 1) % self._world, group=self._group)
        self._thread.join()
