"""Feeds `RunState` from the bus: the log without observations and actions, heartbeats, and how full the log is."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.errors import BusClosed, BusError, RequestUnanswered
from fleetbus.heartbeats import follow_heartbeats
from fleetbus.loop_clock import get_clock
from fleetbus_schemas import EpisodeRequested, MalformedMessage, Message, Subjects
from fleetbus_schemas.message import decode_any
from fleetbus_workers.overview.jetstream import ServerView, fetch_server_view
from fleetbus_workers.overview.progress import FOLLOWED
from fleetbus_workers.overview.state import RunState
from fleetbus_workers.overview.termination import Driver, Termination, detect_termination

READ_TYPES: tuple[type[Message], ...] = (EpisodeRequested, *FOLLOWED)
LOOK_SECONDS = 2.0
BEHIND_SECONDS = 1.0
RESUME_SECONDS = 120.0
"""For the learner of a run that `up` resumes to come back, before its absence is trouble."""

ALIVE = ("working", "draining", "starting")
"""Workers in these states may continue a run."""

FIRST_ENTRY_SECONDS = 10.0
"""In a log that has entries the first one comes within this, or none of them is of interest."""

log = structlog.get_logger()


class LogHealth:
    """How the log stands. ``problem`` is why the last look failed, empty if it did not."""

    def __init__(self) -> None:
        self.bytes = 0
        self.limit_bytes = 0
        self.last_sequence = 0
        self.followed = 0
        self.entries_per_second = 0.0
        self.problem = ""
        self.problem_since = 0.0
        """Monotonic seconds; of the first look that failed since one that did not."""
        self._polled_at: float | None = None

    def record_failure(self, problem: str, now: float) -> None:
        if not self.problem:
            self.problem_since = now
        self.problem = problem

    def record_usage(self, used: int, limit: int, last: int, now: float) -> None:
        if self._polled_at is not None and now > self._polled_at:
            self.entries_per_second = (last - self.last_sequence) / (now - self._polled_at)
        self.bytes, self.limit_bytes, self.last_sequence, self._polled_at = used, limit, last, now
        self.problem = ""


class RunObserver:
    """One run, watched. ``driver`` is what is known here of the process that drives it."""

    def __init__(self, bus: Bus, subjects: Subjects, state: RunState, driver: Driver | None = None) -> None:
        self._bus = bus
        self._subjects = subjects
        self.state = state
        self.health = LogHealth()
        self.server = ServerView()
        self._driver = driver or Driver()
        self.bus = bus
        self._clock = anyio.current_time
        self._began = self._applied_at = -math.inf
        self._resumed_at = math.inf
        self._end: int | None = None
        self._has_caught_up = False

    def is_behind(self, now: float) -> bool:
        """Whether the log of before the beginning is still being read, so that what is known now may be long over.

        It is read once an entry comes that was stored later; its last entries may be of no interest here, so silence counts.
        """
        if not self._has_caught_up and self._end is not None:
            patience = BEHIND_SECONDS if self.health.followed or not self._end else FIRST_ENTRY_SECONDS
            self._has_caught_up = self.health.followed >= self._end or now - max(self._applied_at, self._began) >= patience
        return not self._has_caught_up

    def find_termination(self, now: float) -> Termination | None:
        """How the run ended, None while it continues or is not known well enough."""
        state, progress = self.state, self.state.progress
        if self.is_behind(now):
            return None
        return detect_termination(
            state.termination_state,
            self._driver,
            is_silent=bool(self.health.problem),
            is_anybody_alive=any(row.state in ALIVE for row in state.worker_registry.rows(now)),
            last_time_ns=state.last_time_ns,
            step=progress.step,
            steps=progress.steps,
            now_ns=self._bus.now_ns(),
        )

    def may_be_stuck(self, now: float) -> bool:
        """Whether stalls should be checked: the run is known, not over, and not just being resumed."""
        return not self.is_behind(now) and self.find_termination(now) is None and not self._is_being_resumed(now)

    def _is_being_resumed(self, now: float) -> bool:
        """An `up` drives the run, whose learner has not come back yet: it may take its time."""
        has_learner = any(row.role == "learner" and row.state in ALIVE for row in self.state.worker_registry.rows(now))
        if has_learner or not self._driver.is_driving():
            self._resumed_at = math.inf
            return False
        self._resumed_at = min(self._resumed_at, now)
        return now - self._resumed_at < RESUME_SECONDS

    async def run(self) -> None:
        """Until cancelled, or until the connection is gone for good."""
        self._clock = get_clock()
        self._began = self._clock()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_log)
            tasks.start_soon(self._follow_heartbeats)
            tasks.start_soon(self._poll_usage)

    async def _follow_log(self) -> None:
        subjects = self._subjects
        followed = [subjects.tasks(), subjects.episodes, subjects.train("*"), subjects.policy("*"), subjects.life("*", "*")]
        await self._read_existing_entries(followed)
        async with self._bus.read(followed, start=self.health.followed + 1) as reader:
            while True:
                self._apply_entry(await reader.receive())

    async def _read_existing_entries(self, followed: list[str]) -> None:
        """A scan is several times as fast as a reader by several filters; what it does not get is read after it."""
        try:
            async for entry in self._bus.scan(followed):
                self._apply_entry(entry)
        except RequestUnanswered as error:
            log.warning("log scan failed; reading entry by entry", reason=str(error))

    def _apply_entry(self, entry: StreamEntry) -> None:
        self.health.followed = entry.sequence
        self._applied_at = now = self._clock()
        try:
            message = decode_any(READ_TYPES, entry.payload, subject=entry.subject)
        except MalformedMessage as malformed:
            self.state.malformed += 1
            log.warning("entry is malformed; ignoring it", sequence=entry.sequence, reason=malformed.reason)
            return
        self.state.apply(entry, message, now, self._bus.now_ns())

    async def _follow_heartbeats(self) -> None:
        registry = self.state.worker_registry
        await follow_heartbeats(
            self._bus, self._subjects.heartbeats, lambda beat: registry.record_heartbeat(beat, anyio.current_time())
        )

    async def _poll_usage(self) -> None:
        while True:
            try:
                with anyio.fail_after(LOOK_SECONDS):
                    used, limit = await self._bus.usage()
                    self.health.record_usage(used, limit, await self._bus.last_sequence(), anyio.current_time())
                if self._end is None:
                    self._end = self.health.last_sequence
            except BusClosed:
                raise
            except TimeoutError:
                self.health.record_failure("the NATS server does not answer", anyio.current_time() - LOOK_SECONDS)
            except BusError as error:
                self.health.record_failure(str(error) or type(error).__name__, anyio.current_time())
            await anyio.sleep(LOOK_SECONDS)

    async def fetch_server_view(self, nats_http: Callable[[], str | None]) -> None:
        """Keep ``server`` as of now, for ever: for those who want it whether they show it or not. The address is asked for
        every time: a server that is started again may have another."""
        while True:
            self.server = await fetch_server_view(self._bus, self._subjects.run, nats_http())
            await anyio.sleep(LOOK_SECONDS)
