"""The server of a run that no `up` drives, for all that look at it: ``python -m .... viewer_server FOLDER``.

Viewers hold a lock together; the server ends when none holds it any more, or when an `up` wants the files. It takes the port
that the run's own server had, so that a viewer's connection outlives both the run and its resumption.
"""

import errno
import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import anyio
import msgspec

from fleetbus.auth.local_key import write_local_config
from fleetbus.auth.stores import find_account
from fleetbus.bus.nats.server import run_server
from fleetbus.config.run_folder import RunFolder
from fleetbus.errors import UserError
from fleetbus.files import replace_file
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED, REFUSED
from fleetbus_workers.up import address
from fleetbus_workers.up.lock import is_held, lock_run
from fleetbus_workers.up.run import find_free_port

CHECK_SECONDS = 0.1
EVICTION_SECONDS = 15.0
"""For the server of viewers to leave when `up` begins."""


def viewers_lock(folder: RunFolder) -> Path:
    """Held together by all viewers."""
    return folder.path / "viewers.lock"


def server_lock(folder: RunFolder) -> Path:
    """Held by the server of the viewers."""
    return folder.path / "viewer-server.lock"


def address_file(folder: RunFolder) -> Path:
    """The file with the address of the viewers' server, while it runs."""
    return folder.path / "viewer-server.json"


@contextmanager
def join_viewers(folder: RunFolder) -> Iterator[IO[str]]:
    """Be one of the viewers for the length of the block. Raises `UserError` where no server can write its files."""
    try:
        opened = viewers_lock(folder).open("a")
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        raise UserError(
            f"the log in {folder.path} cannot be served ({error.strerror}): copy the run's folder to where it can be written, "
            "or name a server (--nats) or an archive (--archive)"
        ) from error
    with opened as holder:
        fcntl.flock(holder, fcntl.LOCK_SH)
        yield holder


def has_viewers(folder: RunFolder) -> bool:
    """True if anybody looks at the run; not for viewers, who do."""
    with viewers_lock(folder).open("a") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_address(folder: RunFolder) -> str:
    """The URL of the server of the viewers, empty if there is none. Who asks is a viewer already, so that it stays."""
    if not is_held(server_lock(folder)):
        return ""
    written = address.read_address(address_file(folder))
    return written.url if written else ""


def evict_viewers(folder: RunFolder) -> None:
    """Wait until the server of the viewers has let the files go; it does so once the run's lock is held. Raises `UserError`."""
    deadline = time.monotonic() + EVICTION_SECONDS
    while is_held(server_lock(folder)):
        if time.monotonic() > deadline:
            raise UserError(f"the files of the run in {folder.path} are still served to viewers: end them, or try again")
        time.sleep(CHECK_SECONDS)


async def serve_viewers(folder: RunFolder) -> None:
    """Serve the run's files until nobody looks at them any more, or an `up` drives the run. Raises `UserError`."""
    with lock_run(server_lock(folder), folder.path.name):
        # files that were written with keys, too, are shown to whoever may read them
        config = write_local_config(folder.store, find_account(folder.store, folder.path.name))
        port = find_free_port(folder.port)
        async with run_server(folder.store, port=port, config=config, ends_with_parent=True) as server:
            written = address.Address(url=server.url, pid=server.pid, monitor=server.monitor_url or "")
            replace_file(address_file(folder), msgspec.json.encode(written))
            try:
                while not is_held(folder.lock) and not _is_unwatched(folder):  # noqa: ASYNC110  # locks tell nobody
                    await anyio.sleep(CHECK_SECONDS)
            finally:
                address_file(folder).unlink(missing_ok=True)


def _is_unwatched(folder: RunFolder) -> bool:
    """True if no viewer is left; then the address is gone before another can read it."""
    with viewers_lock(folder).open("a") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        address_file(folder).unlink(missing_ok=True)
        return True


def main(path: str) -> int:
    """Exit status 2 if another serves the files already."""
    try:
        run_async(serve_viewers, RunFolder(Path(path)))
    except UserError as error:
        print(f"fleetbus: {error}", file=sys.stderr)  # noqa: T201
        return REFUSED
    return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
