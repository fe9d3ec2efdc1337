"""The two named pipes to a process in another interpreter, which may run in the sandbox: no descriptor is passed there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_pipes(folder: Path) -> Iterator[tuple[int, int]]:
    """The pipes ``requests`` and ``replies`` in a folder, from this side: open for both, so that neither side waits."""
    opened = []
    try:
        for name in ("requests", "replies"):
            os.mkfifo(folder / name)
            opened.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK))
        yield opened[0], opened[1]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def remove_names(folder: Path) -> None:
    """Have nothing that the runner starts for the policy open them."""
    for name in ("requests", "replies"):
        (folder / name).unlink(missing_ok=True)
