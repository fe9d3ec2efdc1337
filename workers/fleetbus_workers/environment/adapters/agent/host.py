"""Runs the agents of one worker: in the sandbox if this machine has one, else as the worker's user; removes what a crash left.

In the sandbox an agent sees its program and its working folder, and reaches nothing but the endpoint. A sandbox ends with its
worker. Without one, all that an agent started is found by the labels in its variables, here or by a later worker on this host.
"""

import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup, TaskStatus

from fleetbus.processors import count_processors
from fleetbus_workers.environment.adapters.agent.endpoint import AgentEndpoint
from fleetbus_workers.environment.adapters.agent.process import (
    AgentLimits,
    AgentProcess,
    Confinement,
    start_as_this_user,
    start_in_sandbox,
)
from fleetbus_workers.environment.adapters.agent.visible import list_hidden, list_visible
from fleetbus_workers.environment.adapters.providers.process import select_variables
from fleetbus_workers.environment.isolation.foreign_files import (
    TreeTooDeep,
    give_tree,
    measure_tree,
    remove_tree,
    sweep_folders,
)
from fleetbus_workers.environment.isolation.sandbox import Isolation, IsolationUnavailable, SandboxLimits, SandboxSession
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.isolation.sandbox.session import allocate_user
from fleetbus_workers.environment.ownership import NEVER, Labels, build_process_owner, sweep_abandoned_processes

IsolationPolicy = Literal["auto", "required", "off"]
PREFIX = "fleetbus-agent-"
SOCKET = "endpoint"
NOT_PASSED = frozenset({"HOME", "TMPDIR", "TEMP", "TMP"})
"""Variables that name folders which are not there in the sandbox."""

NO_PROC = (
    "the sandbox of agents has no /proc here: Claude Code, Codex and other programs that read it do not start; in a container "
    "permit it (--security-opt systempaths=unconfined), or set environment.agent_isolation = off"
)

STARTS_FOR_EACH_PROCESSOR = 2
START_SECONDS = 10.0
"""An agent that loads for longer, as one that fetches something, lets the next ones start."""

FOLDER_SECONDS = 1.0
"""How often the folder of an agent is measured: no limit of a process bounds how many files it writes."""

log = structlog.get_logger(__name__)


class AgentHost:
    """Makes working folders and starts agents in them; use it inside `run`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        policy: IsolationPolicy,
        passed: Collection[str],
        files: Collection[str] = (),
        secret_files: Collection[Path] = (),
        limits: AgentLimits | None = None,
        code_limits: SandboxLimits | None = None,
    ) -> None:
        self._command = command
        self._passed = passed
        self._files = files
        self._secret_files = secret_files
        self._isolation = find_agent_isolation(policy)
        self._watch = MemoryWatch()
        self._root = Path()
        self._group: TaskGroup | None = None
        self._places = anyio.CapacityLimiter(STARTS_FOR_EACH_PROCESSOR * count_processors())
        self.limits = limits or AgentLimits()
        self.code_limits = code_limits or SandboxLimits()
        self.endpoint = AgentEndpoint()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve the endpoint; what earlier workers left behind is removed first, what is left of this one at the end."""
        await anyio.to_thread.run_sync(sweep)
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{build_process_owner()}-"))
        os.chmod(self._root, 0o711)
        try:
            async with (
                self._watch.run(),
                self.endpoint.run(self._root / SOCKET if self._isolation else None),
                anyio.create_task_group() as self._group,
            ):
                yield
                self._group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, self._root)

    def make_session(self) -> SandboxSession:
        """A sandbox for a verifier's code, also where agents have none. Raises `IsolationUnavailable`."""
        return SandboxSession(require_isolation(), self.code_limits, self._watch)

    def make_folder(self) -> Path:
        """A working folder of nobody else's."""
        return Path(tempfile.mkdtemp(prefix="episode-", dir=self._root))

    async def remove_folder(self, folder: Path) -> None:
        """Nothing may run in it any more."""
        await anyio.to_thread.run_sync(remove_tree, folder)

    async def take_place(self, started: anyio.Event) -> None:
        """Wait until an agent may start: two at a time for each processor, each until ``started``, for `START_SECONDS` at
        most. Where all load at once, all are late for their first call (docs/decisions/0266)."""
        assert self._group is not None, "used outside of `run`"
        await self._group.start(self._hold_place, started)

    async def _hold_place(self, started: anyio.Event, *, task_status: TaskStatus[None]) -> None:
        async with self._places:
            task_status.started()
            with anyio.move_on_after(START_SECONDS):
                await started.wait()

    async def start(self, folder: Path, variables: Mapping[str, str], *, ended: Callable[[], None]) -> AgentProcess:
        """Start the agent in its folder; ``ended`` is called when it has ended. Raises `EnvironmentFailed`."""
        assert self._group is not None, "used outside of `run`"
        selected = select_variables(os.environ, self._passed)
        agent = await self._start(folder, selected, variables)
        agent.watch(self._watch, self.limits)
        self._group.start_soon(self._attend, agent, folder, ended)
        return agent

    async def _attend(self, agent: AgentProcess, folder: Path, ended: Callable[[], None]) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_folder, agent, folder)
            await agent.wait()
            group.cancel_scope.cancel()
        ended()

    async def _watch_folder(self, agent: AgentProcess, folder: Path) -> None:
        limit = self.limits.folder_bytes
        while True:
            await anyio.sleep(FOLDER_SECONDS)
            try:
                used = await anyio.to_thread.run_sync(measure_tree, folder)
            except TreeTooDeep as error:
                agent.end(f"in its working folder: {error}")
                continue
            if used > limit:
                agent.end(f"in its working folder: {used >> 20} MiB, more than {limit >> 20}")

    async def _start(self, folder: Path, selected: Mapping[str, str], variables: Mapping[str, str]) -> AgentProcess:
        if self._isolation is None:
            labels = Labels(run="", episode=secrets.token_hex(8), owner=build_process_owner(), expires=NEVER)
            return await start_as_this_user(self._command, folder, {**selected, **variables}, self.limits, labels)
        inside = {name: value for name, value in selected.items() if name not in NOT_PASSED and not name.startswith("XDG_")}
        visible, hidden = await anyio.to_thread.run_sync(self._list_files)  # a folder of a project's may hold very many
        user, forwarder = allocate_user(), allocate_user()
        if os.geteuid() == 0:
            give_tree(folder, user)
        confinement = Confinement(
            isolation=self._isolation,
            visible=(*visible, self._root / SOCKET),
            hidden=tuple(hidden),
            socket=str(self._root / SOCKET),
            port=self.endpoint.port,
            users=(user, forwarder),
        )
        return await start_in_sandbox(
            self._command, folder, {**inside, "HOME": str(folder), **variables}, self.limits, confinement
        )

    def _list_files(self) -> tuple[list[Path], list[Path]]:
        """The files that an agent sees, and those of them that are hidden all the same."""
        visible = list_visible(self._command, self._files)
        return visible, list_hidden(visible, (*self._secret_files, self._root))


def find_agent_isolation(policy: IsolationPolicy) -> Isolation | None:
    """The isolation of agents, None for none. Raises `IsolationUnavailable` if it is required and there is none."""
    if policy == "off":
        return None
    try:
        isolation = require_isolation()
    except IsolationUnavailable as unavailable:
        if policy == "required":
            raise
        log.warning("no sandbox works here; running agents as this user, with its files and network", reason=str(unavailable))
        return None
    if not isolation.private_proc:
        log.warning(NO_PROC, isolation=isolation.kind)
    return isolation


def sweep() -> None:
    """End what agents of workers that have exited left running, and remove their working folders."""
    sweep_abandoned_processes()
    sweep_folders(PREFIX)
