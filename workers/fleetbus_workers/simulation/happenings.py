"""What happens to the world at its appointed times: crashes, pauses, cuts, restarts, drains, a full log, a second learner."""

from __future__ import annotations

import anyio
import msgspec

from fleetbus.config.run_folder import run_folder
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import ControlRequested, Subjects, encode
from fleetbus_workers.learner.checkpoints import WEIGHTS
from fleetbus_workers.simulation.fleet import Fleet
from fleetbus_workers.simulation.ground import Ground
from fleetbus_workers.simulation.process import RUN, Process
from fleetbus_workers.simulation.scenario import Happening

MOST_WORKERS = 4
LONGEST_RESTART_SECONDS = 5.0
SHORTEST_DAMAGE_SECONDS = 5.0
"""Longer than it takes until the next learner has looked."""


class Happenings:
    """Makes happenings happen; one that finds nobody to happen to is passed over."""

    def __init__(self, ground: Ground, fleet: Fleet) -> None:
        self._ground = ground
        self._fleet = fleet
        self._server = ground.server
        self._books = ground.books
        self._watch = ground.watch
        self._log_plan = ground.log.plan
        self._fills = 0

    async def run(self, happenings: tuple[Happening, ...]) -> None:
        """Each at its time, side by side, until the training is finished."""
        async with anyio.create_task_group() as group:
            for happening in happenings:
                await anyio.sleep_until(happening.at)
                if self._fleet.training_finished.is_set():
                    return
                group.start_soon(self._happen, happening)

    async def _happen(self, happening: Happening) -> None:
        match happening.kind:
            case "crash" | "pause" | "cut" | "drain":
                process = self._picked(happening)
                if process is not None:
                    await self._strike(happening, process)
            case "join":
                self._join("inference" if happening.role == "inference" else "environment")
            case "second_learner":
                self._fleet.start("learner")
            case "restart_server":
                await self._restart_server(happening)
            case "fill_log":
                await self._fill_log(happening.seconds)
            case "cancel":
                await self._cancel(happening.pick)
            case "spoil_checkpoint":
                await self._spoil_checkpoint(happening)

    def _picked(self, happening: Happening) -> Process | None:
        alive = [process for process in self._fleet.alive(happening.role) if process.gate.is_open]
        return alive[happening.pick % len(alive)] if alive else None

    async def _strike(self, happening: Happening, process: Process) -> None:
        match happening.kind:
            case "crash":
                process.crash()
            case "pause":
                await process.pause(happening.seconds)
            case "cut":
                await process.cut_off(happening.seconds)
            case "drain":
                process.stop()

    def _join(self, role: str) -> None:
        if self._fleet.wanted[role] < MOST_WORKERS:
            self._fleet.wanted[role] += 1
            self._fleet.start(role)

    async def _restart_server(self, happening: Happening) -> None:
        seconds = min(happening.seconds, LONGEST_RESTART_SECONDS)
        self._watch.disturb("restart_server", seconds=seconds)
        self._server.kill(forgotten_acks=happening.pick % 200)
        await anyio.sleep(seconds)
        self._server.restart()

    async def _fill_log(self, seconds: float) -> None:
        """The log refuses everything until an operator gives it room."""
        stream = self._ground.log
        self._watch.disturb("fill_log", seconds=seconds)
        self._fills += 1
        stream.plan = msgspec.structs.replace(self._log_plan, max_bytes=max(stream.size_bytes, 1))
        await anyio.sleep(seconds)
        self._fills -= 1
        if not self._fills:
            stream.plan = self._log_plan

    async def _cancel(self, pick: int) -> None:
        """An operator cancels an episode that is being played."""
        running = [pages for pages in self._books.episodes.open.values() if pages.claims]
        if not running:
            return
        pages = running[pick % len(running)]
        episode, worker = pages.request.episode_id, pages.claims[-1][1].worker
        self._ground.judge.cancelled.add(episode)
        self._watch.trace("cancel", episode, worker)
        order = encode(ControlRequested(command="cancel", episodes=(episode,)))
        try:
            async with self._server.connect(RUN, worker="operator") as bus:
                await bus.request(Subjects(RUN).control("environment", worker), order, timeout=2.0)
        except (BusError, UserError) as error:
            self._watch.trace("cancel", episode, "unanswered", type(error).__name__)

    async def _spoil_checkpoint(self, happening: Happening) -> None:
        """The newest checkpoint cannot be read, and its learner dies: it was damaged, or its disk is away for a while.

        In the second case the next learner dies, too, and the one after it finds a checkpoint of a lineage that was cut.
        """
        folder = run_folder(self._ground.configuration.run).checkpoints
        whole = sorted(folder.glob("*/checkpoint.json"), key=lambda path: path.stat().st_mtime_ns)
        learners = self._fleet.alive("learner")
        if not whole or not learners:
            return
        weights = whole[-1].parent / WEIGHTS
        before = weights.read_bytes()
        weights.write_text("damaged")
        self._watch.trace("spoil", weights.parent.name)
        learners[-1].crash()
        if happening.pick % 2:
            await anyio.sleep(SHORTEST_DAMAGE_SECONDS + happening.seconds)
            if weights.exists():
                weights.write_bytes(before)
                self._watch.trace("mend", weights.parent.name)
            for learner in self._fleet.alive("learner"):
                learner.crash()
