"""Feeds `Progress` from the bus: the log's training, episode, policy and life entries, and heartbeats. The training of the
policies of seats goes to a progress of its own (docs/decisions/0253-up-of-several-learners.md)."""

from collections.abc import Callable

import anyio

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.delivery.heartbeats import follow_heartbeats
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Heartbeat, Message, Subjects
from fleetbus_workers.observe.run.own_reward import show_own_reward
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.display import Display, PlainDisplay
from fleetbus_workers.up.progress_guard import ProgressGuard
from fleetbus_workers.up.restarts import Achievements
from fleetbus_workers.up.seat_workers import name_learner


class Follower:
    """Folds the log of one run, from its first entry on, into ``progress``; what is new is shown."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        policy: str,
        progress: Progress,
        display: Display,
        guard: ProgressGuard,
        achievements: Achievements,
    ) -> None:
        self._bus = bus
        self._heartbeats = subjects.heartbeats
        policies = (policy, *progress.others)
        trained = [subject(each) for each in policies for subject in (subjects.train, subjects.policy)]
        self._followed = [*trained, subjects.episodes, subjects.life("*", "*")]
        self._others = {subject(each): each for each in progress.others for subject in (subjects.train, subjects.policy)}
        self._other_displays = {
            name: PlainDisplay(other, _prefix(f"{name}: ", display.line)) for name, other in progress.others.items()
        }
        self._progress = progress
        self._display = display
        self._guard = guard
        self._achievements = achievements
        self._next_sequence = 1
        self._shown_from = 1

    async def run(self) -> None:
        """Follow the log and the heartbeats until cancelled."""
        self._shown_from = (await self._bus.log_state()).last_sequence + 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_log)
            tasks.start_soon(self._follow_heartbeats)

    async def finish(self) -> None:
        """After `run`: take in what the log holds beyond."""
        async for entry in self._bus.scan(self._followed, start=self._next_sequence):
            self._apply_entry(entry)

    async def _follow_log(self) -> None:
        async for entry in self._bus.scan(self._followed, start=self._next_sequence):  # of a run that is resumed: faster so
            self._apply_entry(entry)
        async with self._bus.read(self._followed, start=self._next_sequence) as reader:
            while True:
                self._apply_entry(await reader.receive())

    def _apply_entry(self, entry: StreamEntry) -> None:
        self._next_sequence = entry.sequence + 1
        message = read_stored(entry)
        if message is None:
            return
        if (policy := self._others.get(entry.subject)) is not None:
            self._apply_of_other(policy, message, entry)
            return
        self._progress.apply(message, entry.time_ns)
        if entry.sequence >= self._shown_from:
            self._guard.apply(message, anyio.current_time())
            self._achievements.apply(message)
            self._display.show_message(message)

    def _apply_of_other(self, policy: str, message: Message, entry: StreamEntry) -> None:
        message = show_own_reward(message)
        self._progress.others[policy].apply(message, entry.time_ns)
        if entry.sequence >= self._shown_from:
            self._guard.apply(message, anyio.current_time())
            self._achievements.apply(message, name_learner(policy))
            self._other_displays[policy].show_message(message)

    async def _follow_heartbeats(self) -> None:
        def record(beat: Heartbeat) -> None:
            self._progress.worker_registry.record_heartbeat(beat, anyio.current_time())
            self._guard.record_heartbeat(beat, anyio.current_time())
            self._achievements.record_heartbeat(beat)

        await follow_heartbeats(self._bus, self._heartbeats, record)


def _prefix(prefix: str, write: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: write(prefix + text)
