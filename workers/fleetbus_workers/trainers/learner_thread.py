"""The learner of a run in a thread of the program that trains, with an event loop of its own."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from functools import partial

import anyio
import anyio.to_thread
import structlog
from anyio.from_thread import start_blocking_portal

from fleetbus.bus.base import Bus
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration
from fleetbus.errors import TakenOver, UserError, find_leaf
from fleetbus.files import create_folder
from fleetbus.logs.setup import configure_logs_if_unset
from fleetbus_workers.assembly.learner_parts import build_curriculum, open_group_judge
from fleetbus_workers.assembly.work import serve_role
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url

log = structlog.get_logger()


class LearnerThread:
    """The role ``learner`` with a trainer that is given. `start`, then `check` and `finish`, then `cancel`, from any
    thread."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._stack = ExitStack()
        self._future: Future[None] | None = None

    def start(self, trainer: Trainer) -> None:
        """Begin. Raises `UserError` if no server is known."""
        url = resolve_server_url(self._configuration)
        self._stack.enter_context(configure_logs_if_unset(self._configuration.log))
        portal = self._stack.enter_context(start_blocking_portal("asyncio", backend_options={"use_uvloop": True}))
        self._future = portal.start_task_soon(self._serve, trainer, url)

    def check(self) -> None:
        """Raise what ended the learner, if it does not run: nothing that is trained now would count."""
        if self._future is None:
            raise RuntimeError("the learner does not run; it is started once")
        if not self._future.done():
            return
        if error := self._future.exception():
            if refused := find_leaf(error, UserError):
                raise UserError(str(refused)) from error
            if taken_over := find_leaf(error, TakenOver):
                raise RuntimeError(f"another learner has taken over the run: {taken_over}") from error
            raise RuntimeError("the learner has ended; its log says why") from error
        raise RuntimeError("the learner has ended: the run is finished, or was drained")

    def check_started(self) -> None:
        """The same once it was started."""
        if self._future is not None:
            self.check()

    def finish(self) -> None:
        """Return once the learner has ended by itself. Raises what ended it."""
        assert self._future is not None
        self._future.result()

    def cancel(self) -> None:
        """Stop at once: the run goes on from the last checkpoint. Whatever ended the learner is in its log."""
        if self._future is None:
            return
        self._future.cancel()
        try:
            error = self._future.exception()
        except CancelledError:
            error = None
        if error is not None:
            log.error("learner ended", reason=str(error), exc_info=error)
        self._stack.close()
        self._future = None

    async def _serve(self, trainer: Trainer, url: str) -> None:
        work, name = partial(_work, trainer), generate_worker_name("learner")
        await serve_role("learner", work, self._configuration, name, url, anyio.Event())


async def _work(trainer: Trainer, bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    curriculum = await anyio.to_thread.run_sync(build_curriculum, configuration)
    for files in (policy_folder(configuration.run).weights, policy_folder(configuration.run).checkpoints):
        create_folder(files)
    async with open_group_judge(configuration) as judge:
        await run_learner(
            bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum, judge=judge
        )
