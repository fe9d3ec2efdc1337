"""A run's log for those that only look at it: from the `up` that drives it, else from a server that all viewers share."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from fleetbus.config.run_folder import RunFolder
from fleetbus.errors import UserError
from fleetbus.python_process import build_module_command
from fleetbus_workers.run_access.server_address import find_local_server_url
from fleetbus_workers.up.lock import is_held

START_SECONDS = 60.0
STOP_SECONDS = 6.0
POLL_SECONDS = 0.1
KEEP_SECONDS = 0.5
"""Between two looks at whether the run is served by somebody."""


@asynccontextmanager
async def share_server(folder: RunFolder) -> AsyncIterator[str]:
    """The URL of a server of the run, which stays there for the length of the block: when the `up` that drives the run ends,
    its files are served at the same address, and when an `up` begins it takes over. Raises `UserError`."""
    from fleetbus_workers.up.viewer_server import join_viewers

    server = _ViewerServer(folder)
    try:
        with join_viewers(folder):
            url = await server.find_url()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.keep_running)
                yield url
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # of the one task that the body is
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await server.leave()


class _ViewerServer:
    """The part of one viewer in serving the files."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    async def find_url(self) -> str:
        with anyio.move_on_after(START_SECONDS):
            while True:
                if url := self._find_url_now():
                    return url
                self._start_if_unserved()
                await anyio.sleep(POLL_SECONDS)
        raise UserError(
            f"the files in {self._folder.store} are not served after {START_SECONDS:g} s: see nats-server.log there"
        )

    async def keep_running(self) -> None:
        """Serve the files whenever nobody does, until cancelled."""
        while True:
            await anyio.sleep(KEEP_SECONDS)
            if not self._find_url_now():
                self._start_if_unserved()

    async def leave(self) -> None:
        """Wait for the server that was started here to end, unless there are other viewers."""
        process = self._process
        if process is None:
            return
        from fleetbus_workers.up.viewer_server import has_viewers

        with anyio.move_on_after(STOP_SECONDS):
            while process.poll() is None and not has_viewers(self._folder):  # noqa: ASYNC110  # locks tell nobody
                await anyio.sleep(POLL_SECONDS / 2)
        if process.poll() is None:
            process.returncode = 0  # it runs on for others, and is nobody's child then

    def _find_url_now(self) -> str:
        from fleetbus_workers.up.viewer_server import read_address

        return find_local_server_url(self._folder) or read_address(self._folder)

    def _start_if_unserved(self) -> None:
        if is_held(self._folder.lock) or (self._process is not None and self._process.poll() is None):
            return
        self._process = subprocess.Popen(
            build_module_command("fleetbus_workers.up.viewer_server", str(self._folder.path.absolute())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
