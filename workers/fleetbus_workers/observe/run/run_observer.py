"""Feeds `RunState` from the bus: the log without observations and actions, heartbeats, and how full the log is.

A long log takes minutes to read. Whoever shows a run to a person begins with its newest entries and follows them, while all of
the log is folded beside; that fold takes the place of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS, follow_heartbeats
from fleetbus.errors import BusClosed, BusError, RequestUnanswered
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Heartbeat, Subjects
from fleetbus_workers.observe.run.jetstream import ServerView, fetch_server_view
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Driver, Termination, detect_termination

LOOK_SECONDS = 2.0
BEHIND_SECONDS = 1.0
RESUME_SECONDS = 120.0
"""For the learner of a run that `up` resumes to come back, before its absence is trouble."""

ALIVE = ("working", "draining", "starting")
"""Workers in these states may continue a run."""

FIRST_ENTRY_SECONDS = 10.0
"""In a log that has entries the first one comes within this, or none of them is of interest."""

RECENT_ENTRIES = 20_000
"""So many of the newest entries are folded first, in half a second."""

RECENT_TRAINING_ENTRIES = 10 * RECENT_ENTRIES
"""So far back training, versions and lives of workers are, of which there are few: the newest points of the curves."""

RETRY_SECONDS = 1.0

log = structlog.get_logger()


class LogHealth:
    """The health of the log. ``problem`` is why the last look failed, ``storage_problem`` why the server stores nothing; each
    empty if that is not so."""

    def __init__(self) -> None:
        self.bytes = 0
        self.limit_bytes = 0
        self.last_sequence = 0
        self.followed = 0
        self.counted_from = 1
        """Where the entries begin that are folded; later than the first one while what is older is being read."""
        self.older_read = 0
        """Up to where that is."""
        self.entries_per_second = 0.0
        self.problem = self.storage_problem = ""
        self.problem_since = self.storage_problem_since = 0.0
        """Monotonic seconds; of the first look that failed since one that did not."""
        self._polled_at: float | None = None

    def record_failure(self, problem: str, now: float) -> None:
        if not self.problem:
            self.problem_since = now
        self.problem = problem

    def record_storage(self, problem: str, now: float) -> None:
        """Take in what the server says of its storage, as `nats_http.NatsServer` has it."""
        if problem and not self.storage_problem:
            self.storage_problem_since = now
        self.storage_problem = problem

    def record_usage(self, used: int, limit: int, last: int, now: float) -> None:
        if self._polled_at is not None and now > self._polled_at:
            self.entries_per_second = (last - self.last_sequence) / (now - self._polled_at)
        self.bytes, self.limit_bytes, self.last_sequence, self._polled_at = used, limit, last, now
        self.problem = ""


class RunObserver:
    """One run, watched, with the training of one ``policy``: where several are trained, steps and versions of others are not
    its. ``driver`` is what is known here of the process that drives it. ``recent_first`` shows a long run at once: ``state`` is
    replaced when all of the log is folded, see ``is_whole``."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        state: RunState,
        driver: Driver | None = None,
        *,
        recent_first: bool = False,
        policy: str = "*",
    ) -> None:
        self._training = [subjects.train(policy), subjects.policy(policy)]
        self._recent_first = recent_first
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

    @property
    def is_whole(self) -> bool:
        """True if ``state`` is a fold of all that the log holds."""
        return self.health.counted_from <= 1

    def is_behind(self, now: float) -> bool:
        """True if the log of before the beginning is still being read, so that what is known now may be long over.

        It is read once an entry comes that was stored later; its last entries may be of no interest here, so silence counts.
        """
        if not self._has_caught_up and self._end is not None:
            patience = BEHIND_SECONDS if self.health.followed or not self._end else FIRST_ENTRY_SECONDS
            self._has_caught_up = self.health.followed >= self._end or now - max(self._applied_at, self._began) >= patience
        return not self._has_caught_up

    def find_termination(self, now: float) -> Termination | None:
        """Find the end of the run, None while it continues or is not known well enough."""
        state, progress = self.state, self.state.progress
        if self.is_behind(now) or not (self.is_whole or state.termination_state.is_known):
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
        """True if stalls should be checked: the run is known, not over, and not just being resumed. Of what is open only the
        whole log knows, and of who lives only who has listened for as long as a heartbeat takes to come."""
        is_known = self.is_whole and not self.is_behind(now) and now - self._began >= HEARTBEAT_SECONDS
        return is_known and self.find_termination(now) is None and not self._is_being_resumed(now)

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
        recent = await self._find_recent() if self._recent_first else 1
        if recent > 1:
            await self._show_recent(recent)
        else:
            await self._read_existing_entries(start=1)
        await self._follow_entries()

    async def _find_recent(self) -> int:
        """The sequence of the first of the newest entries: the log's first one, if the log is short or cannot be asked."""
        try:
            return max((await self._bus.log_state()).last_sequence - RECENT_ENTRIES, 0) + 1
        except RequestUnanswered:
            return 1

    async def _show_recent(self, start: int) -> None:
        """Follow the log from ``start`` on until all of it is folded."""
        self.health.counted_from = start
        await self._read_training_before(start)
        await self._read_existing_entries(start=start)
        whole = RunState(self.state.progress.steps)
        async with open_first_error_task_group() as tasks:
            tasks.start_soon(self._follow_entries)
            await self._fold_all(whole)
            tasks.cancel_scope.cancel()
        whole.take_over(self.state)
        self.state = whole
        self.health.counted_from, self.health.followed = 1, self.health.older_read

    async def _read_training_before(self, start: int) -> None:
        subjects = self._subjects
        few = [*self._training, subjects.life("*", "*"), subjects.operations]
        try:
            async for entry in self._bus.scan(few, start=start - RECENT_TRAINING_ENTRIES):
                if entry.sequence < start:
                    self._apply_entry(entry, self.state)
        except RequestUnanswered as error:
            log.warning("log scan failed; beginning with the newest entries", reason=str(error))

    async def _fold_all(self, whole: RunState) -> None:
        """Fold the log from its beginning to its end as of now into ``whole``."""
        while True:
            try:
                end = (await self._bus.log_state()).last_sequence
                async for entry in self._bus.scan(self._followed, start=self.health.older_read + 1):
                    self._apply_entry(entry, whole)
                    self.health.older_read = entry.sequence
            except RequestUnanswered as error:
                log.warning("log scan failed; continuing it", sequence=self.health.older_read, reason=str(error))
                await anyio.sleep(RETRY_SECONDS)
            else:
                self.health.older_read = max(self.health.older_read, end)
                return

    async def _read_existing_entries(self, *, start: int) -> None:
        """A scan is several times as fast as a reader by several filters; what it does not get is read after it."""
        try:
            async for entry in self._bus.scan(self._followed, start=start):
                self._apply_entry(entry, self.state)
                self.health.followed = entry.sequence
        except RequestUnanswered as error:
            log.warning("log scan failed; reading entry by entry", reason=str(error))
        else:
            self._has_caught_up = True
        self.health.followed = max(self.health.followed, start - 1)

    async def _follow_entries(self) -> None:
        async with self._bus.read(self._followed, start=self.health.followed + 1) as reader:
            while True:
                entry = await reader.receive()
                self._apply_entry(entry, self.state)
                self.health.followed = entry.sequence

    @property
    def _followed(self) -> list[str]:
        subjects = self._subjects
        kinds = [subjects.tasks(), subjects.episodes, subjects.labels, subjects.operations]
        return [*kinds, *self._training, subjects.life("*", "*")]

    def _apply_entry(self, entry: StreamEntry, state: RunState) -> None:
        self._applied_at = now = self._clock()
        message = read_stored(entry)
        if message is None:
            state.malformed += 1
            return
        state.apply(entry, message, now, self._bus.now_ns())

    async def _follow_heartbeats(self) -> None:
        def record(beat: Heartbeat) -> None:
            self.state.worker_registry.record_heartbeat(beat, anyio.current_time())

        await follow_heartbeats(self._bus, self._subjects.heartbeats, record)

    async def _poll_usage(self) -> None:
        while True:
            try:
                with anyio.fail_after(LOOK_SECONDS):
                    found = await self._bus.log_state()
                self.health.record_usage(found.used_bytes, found.limit_bytes, found.last_sequence, anyio.current_time())
                if self._end is None:
                    self._end = self.health.last_sequence
            except BusClosed:
                raise
            except TimeoutError:
                self.health.record_failure("the NATS server does not answer", anyio.current_time() - LOOK_SECONDS)
            except BusError as error:
                self.health.record_failure(str(error) or type(error).__name__, anyio.current_time())
            await anyio.sleep(LOOK_SECONDS)

    async def fetch_server_view(self, nats_http: Callable[[], str | None]) -> ServerView:
        """The server's view of the run as of now, of which ``server`` and ``health`` take note."""
        self.server = await fetch_server_view(self._bus, self._subjects.run, nats_http())
        self.health.record_storage(self.server.storage_problem, anyio.current_time())
        return self.server

    async def follow_server_view(self, nats_http: Callable[[], str | None]) -> None:
        """Keep it as of now, for ever: for those who want it whether they show it or not. The address is asked for every time:
        a server that is started again may have another."""
        while True:
            await self.fetch_server_view(nats_http)
            await anyio.sleep(LOOK_SECONDS)
