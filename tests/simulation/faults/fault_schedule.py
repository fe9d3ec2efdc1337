"""Injects the scheduled faults: crashes, pauses, cuts, restarts, drains, a full log, a second learner."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec

from fleetbus.bus.streams import StreamPlan, lane_stream, log_stream
from fleetbus.config.run_folder import policy_folder
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import ControlRequested, Subjects, encode
from fleetbus_workers.learner.checkpoints import WEIGHTS
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.deployment.workers import Deployment
from tests.simulation.observer import GARBAGE
from tests.simulation.platform.process import RUN, Process
from tests.simulation.platform.storage_faults import AWAY_SHARE, FULL_SHARE, rewind_checkpoints, take_away
from tests.simulation.scenario.shape import ScheduledFault

MOST_WORKERS = 4
LONGEST_RESTART_SECONDS = 5.0
ORDER_SECONDS = 2.0
SHORTEST_DAMAGE_SECONDS = 5.0
"""Longer than it takes until the next learner has looked."""

CLOCK_SHARE = 1200.0
"""So many times as far is a clock set as other faults last: by minutes, or by hours."""


class FaultInjector:
    """Injects faults at their times; a fault without a live target is skipped."""

    def __init__(self, fixtures: SimulationFixtures, fleet: Deployment) -> None:
        self._fixtures = fixtures
        self._fleet = fleet
        self._server = fixtures.server
        self._log_checker = fixtures.log_checker
        self._observer = fixtures.observer
        self._plans: dict[str, StreamPlan] = {}
        self._fills: Counter[str] = Counter()
        self._elections = 0

    async def run(self, fault_schedule: tuple[ScheduledFault, ...]) -> None:
        """Each at its time, side by side, until the training is finished."""
        async with anyio.create_task_group() as group:
            for fault in fault_schedule:
                await anyio.sleep_until(fault.at)
                if self._fleet.training_finished.is_set():
                    return
                group.start_soon(self._inject, fault)

    async def _inject(self, fault: ScheduledFault) -> None:
        match fault.kind:
            case "crash" | "pause" | "cut" | "drain" | "slow_consumer":
                process = self._pick_process(fault)
                if process is not None:
                    await self._inject_process_fault(fault, process)
            case "join":
                self._add_worker("inference" if fault.role == "inference" else "environment")
            case "second_learner":
                self._fleet.start("learner", self._pick_policy(fault.pick))
            case "visit":
                self._fleet.visit(fault.role)
            case "leave":
                await self._fleet.leave(fault.role, fault.seconds)
            case "restart_server":
                await self._restart_server(fault)
            case "fill_log":
                await self._fill_log(log_stream(RUN), fault.seconds)
            case "fill_lanes":
                await self._fill_log(lane_stream(RUN), fault.seconds)
            case "cancel":
                await self._cancel(fault.pick)
            case "spoil_checkpoint":
                await self._corrupt_checkpoint(fault)
            case "elect":
                await self._elect(min(fault.seconds, LONGEST_RESTART_SECONDS))
            case "step_clock":
                self._step_clock(fault)
            case "set_clock":
                await self._set_clock(fault)
            case "renew_consumers":
                self._observer.disturb("renew_consumers")
                self._server.renew_consumers(log_stream(RUN), fault.pick)
            case "break_disk":
                self._fixtures.disks.fail_soon(fault.role)
            case "fill_disk":
                writers = ("learner", "recorder") if self._fixtures.scenario.recorder else ("learner",)
                self._fixtures.disks.fill(writers[fault.pick % len(writers)], fault.seconds * FULL_SHARE)
            case "lose_checkpoints":
                await self._lose_checkpoints(fault.seconds * AWAY_SHARE, self._pick_policy(fault.pick))
            case "rewind_checkpoints":
                self._rewind_checkpoints(1 + fault.pick % 2, self._pick_policy(fault.pick // 2))
            case "garbage":
                self._store_garbage(fault.pick)
            case "pause_requests":
                await self._pause_requests(fault.seconds)

    def _pick_policy(self, pick: int) -> str:
        """One of those that have learners."""
        policies = list(self._fleet.configurations)
        return policies[pick % len(policies)]

    def _find_checkpoints(self, policy: str) -> Path:
        return policy_folder(self._fleet.configurations[policy].run).checkpoints

    def _pick_process(self, fault: ScheduledFault) -> Process | None:
        alive = [process for process in self._fleet.alive(fault.role) if process.gate.is_open]
        return alive[fault.pick % len(alive)] if alive else None

    async def _inject_process_fault(self, fault: ScheduledFault, process: Process) -> None:
        match fault.kind:
            case "crash":
                process.crash()
            case "pause":
                await process.pause(fault.seconds)
            case "cut":
                await process.cut_off(fault.seconds)
            case "slow_consumer":
                await process.fall_behind(fault.seconds)
            case "drain":
                process.stop()

    def _add_worker(self, role: str) -> None:
        if self._fleet.wanted[role] < MOST_WORKERS:
            self._fleet.wanted[role] += 1
            self._fleet.start(role)

    async def _restart_server(self, fault: ScheduledFault) -> None:
        seconds = min(fault.seconds, LONGEST_RESTART_SECONDS)
        self._observer.disturb("restart_server", seconds=seconds)
        self._server.kill(forgotten_acks=fault.pick % 200)
        await anyio.sleep(seconds)
        self._server.restart()

    async def _fill_log(self, name: str, seconds: float) -> None:
        """A stream refuses everything until an operator gives it room."""
        stream = self._server.stream(name)
        plan = self._plans.setdefault(name, stream.plan)
        self._observer.disturb("fill_log", seconds=seconds)
        self._fills[name] += 1
        stream.plan = msgspec.structs.replace(plan, max_bytes=max(stream.size_bytes, 1))
        await anyio.sleep(seconds)
        self._fills[name] -= 1
        if not self._fills[name]:
            stream.plan = plan

    async def _elect(self, seconds: float) -> None:
        """The streams have no leader: nothing is stored, delivered or acked, while replicas answer reads."""
        faults = self._fixtures.network_faults
        self._observer.disturb("elect", seconds=seconds)
        faults.has_leader, self._elections = False, self._elections + 1
        await anyio.sleep(seconds)
        self._elections -= 1
        faults.has_leader = not self._elections

    def _step_clock(self, fault: ScheduledFault) -> None:
        seconds = fault.seconds * (1 if fault.pick % 2 else -1)
        self._observer.disturb("step_clock", seconds=abs(seconds))
        self._step(seconds)

    def _step(self, seconds: float) -> None:
        self._fixtures.oracle.clock_slack_seconds += abs(seconds)
        self._server.step_clock(seconds)

    async def _set_clock(self, fault: ScheduledFault) -> None:
        """By hours, and in every other case back to what it was after a while."""
        seconds = fault.seconds * CLOCK_SHARE * (1 if fault.pick % 2 else -1)
        self._observer.disturb("set_clock")
        self._step(seconds)
        if fault.pick // 2 % 2:
            await anyio.sleep(fault.seconds)
            self._observer.disturb("set_clock")
            self._step(-seconds)

    async def _lose_checkpoints(self, seconds: float, policy: str) -> None:
        """The disk with the checkpoints is away while a learner dies, and comes back."""
        folder, learners = self._find_checkpoints(policy), self._fleet.learners(policy)
        if folder.is_dir() and learners:
            self._observer.disturb("lose_checkpoints", seconds=seconds)
            learners[-1].crash()
            hidden = await take_away(folder, seconds)
            self._log_checker.trainings[policy].hidden |= hidden

    def _rewind_checkpoints(self, count: int, policy: str) -> None:
        """Also while no learner is there: the one before was drained, or has crashed."""
        gone = rewind_checkpoints(self._find_checkpoints(policy), count)
        if gone:
            self._observer.disturb("rewind_checkpoints", ",".join(gone))
        for learner in self._fleet.learners(policy)[-1:] if gone else ():
            learner.crash()

    async def _cancel(self, pick: int) -> None:
        """An operator cancels an episode that is being played."""
        running = [record for record in self._log_checker.episodes.open.values() if record.claims]
        if not running:
            return
        record = running[pick % len(running)]
        episode, worker = record.request.episode_id, record.claims[-1][1].worker
        self._fixtures.oracle.cancelled.add(episode)
        await self._order("environment", worker, ControlRequested(command="cancel", episodes=(episode,)))

    def _store_garbage(self, pick: int) -> None:
        """Somebody writes what is no message, on a subject that workers read."""
        subjects = Subjects(RUN)
        episodes = sorted(self._log_checker.episodes.open) or ["nobody"]
        episode = episodes[pick % len(episodes)]
        where = (
            subjects.task("default", f"garbage-{pick}"),
            subjects.episode(episode),
            subjects.observation("default", "any", episode),
            subjects.action("e0", episode),
        )
        log = self._fixtures.log
        subject = where[pick % len(where)]
        self._observer.disturb("garbage", subject)
        with suppress(BusError):
            log.store(subject, GARBAGE, f"garbage-{log.last_sequence}", None, self._server.now_ns())

    async def _pause_requests(self, seconds: float) -> None:
        """An operator has the learner ask for nothing new for a while, and tells it to go on until it answers."""
        for learner in self._fleet.alive("learner"):
            await self._order("learner", learner.name, ControlRequested(command="pause"))
        await anyio.sleep(seconds)
        for learner in self._fleet.alive("learner"):
            while learner.is_alive:
                if await self._order("learner", learner.name, ControlRequested(command="resume")):
                    break
                await anyio.sleep(ORDER_SECONDS)

    async def _order(self, role: str, worker: str, order: ControlRequested) -> bool:
        """False if nobody answers."""
        self._observer.trace(order.command, *order.episodes, worker)
        try:
            async with self._server.connect(RUN, worker="operator") as bus:
                await bus.request(Subjects(RUN).control(role, worker, order.command), encode(order), timeout=ORDER_SECONDS)
        except (BusError, UserError) as error:
            self._observer.trace(order.command, *order.episodes, "unanswered", type(error).__name__)
            return False
        return True

    async def _corrupt_checkpoint(self, fault: ScheduledFault) -> None:
        """The newest checkpoint cannot be read, and its learner dies: it was damaged, or its disk is away for a while.

        In the second case the next learner dies, too, and the one after it finds a checkpoint of a lineage that was cut.
        """
        policy = self._pick_policy(fault.pick // 2)
        folder = self._find_checkpoints(policy)
        whole = sorted(folder.glob("*/checkpoint.json"), key=lambda path: path.stat().st_mtime_ns)
        learners = self._fleet.learners(policy)
        if not whole or not learners:
            return
        weights = whole[-1].parent / WEIGHTS
        before = weights.read_bytes()
        weights.write_text("damaged")
        self._observer.disturb("spoil_checkpoint", weights.parent.name)
        learners[-1].crash()
        if fault.pick % 2:
            await anyio.sleep(SHORTEST_DAMAGE_SECONDS + fault.seconds)
            if weights.exists():
                weights.write_bytes(before)
                self._observer.trace("mend", weights.parent.name)
            for learner in self._fleet.learners(policy):
                learner.crash()
