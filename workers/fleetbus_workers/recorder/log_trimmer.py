"""Trims the log: removes entries that are archived and settled for good, so that the log holds what is open and little more.

Observations and actions go once all consumers acked them and the duplicate window is over. Everything else goes when it has
been settled for a while, and only after the floor was raised in the log (`FloorRaised`): what the removed entries refused is
refused by number from then on.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.concurrency.runtime import Runtime
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.core.training.floor import NO_FLOOR
from fleetbus.core.training.retention import Retention, SessionRetention
from fleetbus.errors import LogFull, PublishUnanswered, SequenceConflict
from fleetbus.log.archive_writer import ArchiveWriter
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import EpisodeFinished, FloorRaised, Message, SessionEnded, SessionRecorded, Subjects, encode
from fleetbus_workers.recorder.trim_limit import compute_trim_limit

SAMPLES_PER_WINDOW = 64

SETTLE_SECONDS = 120.0
"""How long something has to be settled before it leaves: a request or a call to open a session that is on its way for longer is
refused when it arrives."""

KEPT_FLOORS = 8
"""Newest entries of the floor that stay: somebody may be reading the one before."""

MAX_JOURNALS_PER_TRIM = 1000
MAX_EPISODES_PER_TRIM = 1000

SHORT_SHARE = 0.6
"""Share of the log above which settled episodes leave one by one from behind an open one: two purges each, so not before."""

REMOVALS_AT_A_TIME = 16
"""Of single episodes or journals. Each takes two answers of the server: one by one, 2,000 take 400 s over a line of 100 ms."""

TELL_SECONDS = 60.0
"""A line about what was removed, no more often."""

_READ = frozenset({"task", "episode", "train", "policy", "floor", "session"})

log = structlog.get_logger()


class _WentBack(Exception):
    """The log lost entries that are archived."""


class _Ages:
    """Finds the newest sampled entry that is older than a window. Its age is the server's word when it is entered; from then on
    it is counted here, as the server's clock may be set."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[int, float]] = deque()
        self._newest = (0, -math.inf)
        self._position = 0

    def enter(self, sequence: int, age_seconds: float) -> None:
        stored_at = max(anyio.current_time() - max(age_seconds, 0.0), self._newest[1])  # not before the one before it
        self._newest = (sequence, stored_at)
        if not self._samples or stored_at - self._samples[-1][1] >= self._window_seconds / SAMPLES_PER_WINDOW:
            self._samples.append(self._newest)

    def find_position(self) -> int:
        before = anyio.current_time() - self._window_seconds
        while self._samples and self._samples[0][1] < before:
            self._position = self._samples.popleft()[0]
        if self._newest[1] < before:
            self._position = self._newest[0]
        return self._position


class LogTrimmer:
    """Enter every archived entry in order, then trim now and then. ``last_entered`` is the last entry that was entered."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        archive: ArchiveWriter,
        *,
        window_seconds: float,
        runtime: Runtime,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._archive = archive
        self._runtime = runtime
        self._retention = Retention()
        self._sessions = SessionRetention()
        self._content_ages = _Ages(window_seconds)
        self._settled_ages = _Ages(max(window_seconds, settle_seconds))
        self._unread: deque[tuple[StreamEntry, Message]] = deque()
        """Results of the last window: the client that requested an episode outside of training may be about to read its
        Actions."""
        self._floors: deque[int] = deque()
        self._last_floor = 0
        """Only who has entered the log up to the newest floor raises the next: a learner that begins stores it again."""
        self._raised = 0
        """Where the newest floor stands that was raised here."""
        self._tells_at = -math.inf
        self.last_entered = self._last_ns = 0
        self.trimmed = 0

    @property
    def unsettled(self) -> int:
        """Episodes whose content is still needed."""
        return len(self._retention)

    def find_archive_floor(self) -> int:
        """The sequence from which on the archive has to keep everything."""
        expired = min(self._settled_ages.find_position(), self.last_entered)
        return min(self._retention.find_archive_floor(), self._sessions.compute_prefix(expired))

    def enter(self, entry: StreamEntry) -> None:
        """One entry that is in the archive for good."""
        message = decode_entry(entry)
        if isinstance(message, EpisodeFinished):
            self._unread.append((entry, message))
        elif entry.subject.split(".", 3)[2] == "session":
            self._sessions.enter(entry.sequence, entry.subject.rpartition(".")[2], is_over=ends_session(message))
        else:
            self._retention.enter(entry.sequence, entry.subject, message)
        self.last_entered, self._last_ns = entry.sequence, entry.time_ns
        age_seconds = (self._bus.now_ns() - entry.time_ns) / 1e9
        self._content_ages.enter(entry.sequence, age_seconds)
        if isinstance(message, FloorRaised):  # it would be raised for ever because it was raised
            self._floors.append(entry.sequence)
            self._last_floor = entry.sequence
        else:
            self._settled_ages.enter(entry.sequence, age_seconds)

    async def load_archived(self, last: int) -> None:
        """Everything up to ``last`` is in the archive: read what decides about trimming, and none of what is trimmed first."""
        subjects = self._subjects
        kinds = [subjects.tasks(), subjects.episodes, subjects.train("*"), subjects.policy("*")]
        kinds += [subjects.session("*"), subjects.floor]
        async for entry in self._bus.scan(kinds):
            if entry.sequence <= last:  # what follows is entered once it is archived
                self.enter(entry)
        self._retention.mark_content_skipped()
        if self._archive.last is not None:
            self.last_entered, self._last_ns = last, self._archive.last.time_ns

    async def trim(self) -> None:
        """Remove what may be removed by now; nothing if the log went back in time: what was settled for good is open in it."""
        try:
            await self._check_not_back()
            self._enter_read()
            trimmed = await self._trim_content()
            await self._trim_behind_open()
            settled = await self._settle()
        except _WentBack:
            log.error("log lost entries that are archived; removing nothing", archived_up_to=self.last_entered)
            return
        if settled or trimmed:
            is_due = anyio.current_time() >= self._tells_at
            self._tells_at = anyio.current_time() + TELL_SECONDS if is_due else self._tells_at
            state = await self._bus.log_state()
            (log.info if is_due else log.debug)(
                "log trimmed",
                up_to=self.trimmed,
                settled_up_to=self._retention.floor.sequence - 1,
                used_bytes=state.used_bytes,
                limit_bytes=state.limit_bytes,
                unsettled=self.unsettled,
                sessions=len(self._sessions),
            )

    async def _check_not_back(self) -> None:
        """Raise `_WentBack` if the log ends before the last archived entry or the floor raised since, or has another there.
        Its reader will notice too, but may come back later than the connection."""
        last, last_ns, floor = self.last_entered, self._last_ns, self._raised if self._raised > self.last_entered else 0
        if not last:
            return
        found = await self._bus.next_entry(self._subjects.log, start=floor or last)
        if found is None:  # or everything from there on was removed
            is_lost = (await self._bus.log_state()).last_sequence < (floor or last)
        elif floor:
            is_lost = (found.sequence, found.subject) != (floor, self._subjects.floor)
        else:
            is_lost = found.sequence == last and found.time_ns != last_ns
        if is_lost:
            raise _WentBack

    async def _purge(self, subject: str, *, below: int) -> None:
        """Look before each removal: the log may go back between two. The bus asks for one now or not at all."""
        await self._check_not_back()
        await self._bus.purge(subject, below=below)

    async def _trim_content(self) -> bool:
        """Observations and actions."""
        limit = min(self._retention.limit(self.last_entered), self._content_ages.find_position())
        if limit <= self.trimmed:
            return False
        floor = await compute_trim_limit(self._bus, limit=limit, is_ignorable=self._retention.is_settled)
        if floor <= self.trimmed:
            return False
        await self._runtime.offload(self._archive.guard, floor)
        for subject in (self._subjects.observations(), self._subjects.actions()):
            await self._purge(subject, below=floor + 1)
        self.trimmed = floor
        return True

    async def _trim_behind_open(self) -> None:
        """Observations and actions of settled episodes behind one that stays open for long, once the log is short of room."""
        state = await self._bus.log_state()
        if state.used_bytes <= state.limit_bytes * SHORT_SHARE or not state.limit_bytes:
            return
        position = min(self.last_entered, self._content_ages.find_position())
        if not (episodes := self._retention.list_settled(position, MAX_EPISODES_PER_TRIM, trimmed=self.trimmed)):
            return

        async def remove(episode: str) -> None:
            await self._purge(self._subjects.observation("*", "*", episode), below=position + 1)
            await self._purge(self._subjects.action("*", episode), below=position + 1)
            self._retention.mark_removed(episode, position)

        await self._runtime.offload(self._archive.guard, position)
        await _remove_each(remove, episodes)
        log.info("log is short of room; removed settled episodes behind an open one", episodes=len(episodes))

    async def _settle(self) -> bool:
        """Everything else, as far as it is settled for good."""
        subjects, purge = self._subjects, self._purge
        expired = min(self._settled_ages.find_position(), self.last_entered)
        before, last_floor = self._retention.floor, self._last_floor
        raised = msgspec.structs.replace(self._retention.compute_floor(expired), sessions=max(expired + 1, before.sessions))
        over = self._sessions.list_over(expired)
        if raised.sequence == before.sequence and not over:
            return False
        await self._runtime.offload(self._archive.guard, expired)
        if not await self._raise_floor(raised, last_floor, over):
            return False
        await purge(subjects.tasks(), below=raised.sequence)
        await purge(subjects.episodes, below=raised.sequence)
        await purge(subjects.labels, below=raised.sequence)
        await purge(subjects.operations, below=raised.sequence)
        await purge(subjects.life("*", "*"), below=raised.sequence)
        for kind, name in self._retention.list_names():
            subject = subjects.train(name) if kind == "train" else subjects.policy(name)
            await purge(subject, below=self._retention.find_first_needed(kind, name, raised.sequence))
        await self._remove_journals(over, self._sessions.compute_prefix(expired))
        while len(self._floors) > KEPT_FLOORS:
            await purge(subjects.floor, below=self._floors[0] + 1)
            self._floors.popleft()
        return True

    async def _raise_floor(self, raised: FloorRaised, last_floor: int, over: dict[str, int]) -> bool:
        """Store it before anything that it concerns leaves; False if that was not possible now. ``last_floor`` is the newest
        that was entered when it was computed.

        The floor that holds is stored once more first, and only then does it look whether the log has all that the new one
        was computed from: a log that loses any of that later has lost this entry too, and refuses the new one.
        """
        if raised == self._retention.floor:
            return True
        subject, before = self._subjects.floor, self._retention.floor
        first = not last_floor  # who begins before it stands does not see it: what was archived by then does not count
        try:
            published = await self._bus.publish(subject, encode(NO_FLOOR if first else before), expected_last=last_floor)
            if not first:
                await self._check_not_back()
                published = await self._bus.publish(subject, encode(raised), expected_last=published.sequence)
        except LogFull:
            await self._shorten_journals(over)
            return False
        except SequenceConflict:
            log.info("floor was stored behind the archive; raising it later")
            return False
        except PublishUnanswered as error:
            log.warning("floor publish failed; retrying", reason=str(error))
            return False
        if not first:
            self._raised = published.sequence
            self._retention.enter(published.sequence, subject, raised)
        return not first

    async def _shorten_journals(self, over: dict[str, int]) -> None:
        """A log without room even for the floor: of journals that ended only the end is needed to refuse what comes late."""
        if not over:
            log.error("log is full and nothing in it may leave yet; raise its limit (fleetbus init --nats-max-bytes)")
            return
        log.warning("log is full; shortening journals of ended sessions to their ends", sessions=len(over))

        async def shorten(session: str) -> None:
            await self._purge(self._subjects.session(session), below=over[session])

        await _remove_each(shorten, islice(over, MAX_JOURNALS_PER_TRIM))

    async def _remove_journals(self, over: dict[str, int], prefix: int) -> None:
        """Together as far as no open one stands between them, the others one by one."""
        await self._purge(self._subjects.session("*"), below=prefix)

        async def remove(session: str) -> None:
            await self._purge(self._subjects.session(session), below=over[session] + 1)
            self._sessions.forget(session)

        for session, last in over.items():
            if last < prefix:
                self._sessions.forget(session)
        await _remove_each(remove, islice((each for each, last in over.items() if last >= prefix), MAX_JOURNALS_PER_TRIM))

    def _enter_read(self) -> None:
        read = self._settled_ages.find_position()
        while self._unread and self._unread[0][0].sequence <= read:
            entry, message = self._unread.popleft()
            self._retention.enter(entry.sequence, entry.subject, message)


async def _remove_each(remove: Callable[[str], Awaitable[None]], names: Iterable[str]) -> None:
    """Call ``remove`` for every name, `REMOVALS_AT_A_TIME`; raises the first error."""
    left = iter(names)

    async def work() -> None:
        for name in left:
            await remove(name)

    async with open_first_error_task_group() as tasks:
        for _ in range(REMOVALS_AT_A_TIME):
            tasks.start_soon(work)


def decode_entry(entry: StreamEntry) -> Message | None:
    return read_stored(entry) if entry.subject.split(".", 3)[2] in _READ else None


def ends_session(message: Message | None) -> bool:
    return isinstance(message, SessionEnded) or (isinstance(message, SessionRecorded) and message.answer.end is not None)
