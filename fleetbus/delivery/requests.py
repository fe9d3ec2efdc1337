"""Episode requests: built from tasks, stored once each, closed by their author when no worker answers.

The log admits new requests only up to a share of its size; the rest is reserved for the work that was admitted.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import anyio
import msgspec
import structlog

from fleetbus.bus.base import LogBus, LogState
from fleetbus.bus.streams import tasks_consumer
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.pools import find_pool, list_pools, parse_pools
from fleetbus.config.seat_limits import parse_seat_limits
from fleetbus.config.seats import build_seats, list_leagues
from fleetbus.config.settings import Configuration
from fleetbus.core.episode.claims import EpisodeState, build_result_without_attempt
from fleetbus.core.training.floor import NO_FLOOR
from fleetbus.delivery.log_room import LogRoom
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.log.archive_reader import find_archived_result
from fleetbus.log.episodes import RETRY_SECONDS, read_entry, read_episode_state, store_result
from fleetbus.log.floor import read_floor, read_floor_after
from fleetbus.logs.trace_context import name_episode
from fleetbus_schemas import (
    EpisodeFinished,
    EpisodeRequested,
    Outcome,
    SamplingSettings,
    SeatPolicy,
    Split,
    Subjects,
    Task,
    encode,
)
from fleetbus_schemas.channels import STORED

EXPIRY_CHECK_SECONDS = 5.0
ENTRIES_PER_EPISODE = 3
"""Request, claim and result."""

ENTRIES_PER_TURN = 2
"""Observation and action."""

STUCK_SECONDS = 300.0
"""Longer than what is settled stays in the log: who still finds no room then says what to do, again and again."""

UNANSWERED = "unanswered"
"""Error class of an episode whose deadline passed without a result of any worker."""

NO_OPPONENTS: Mapping[str, int] = MappingProxyType({})

_UNKNOWN = 0
"""The position of a request that is being stored."""

log = structlog.get_logger()


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it stands in the log at ``sequence``: one that found no room has a later deadline than it was made with, and
    a learner that was replaced may have stored it with an earlier one. ``result``: if the episode has one by now."""

    request: EpisodeRequested
    sequence: int
    result: EpisodeFinished | None = None


class Requests:
    """Publishes requests and tracks them until they are answered, so that none stays open indefinitely."""

    def __init__(
        self, bus: LogBus, subjects: Subjects, *, configuration: Configuration, worker: str, runtime: Runtime | None = None
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._configuration = configuration
        self._worker = worker
        self._runtime = runtime or Runtime()
        self._open: dict[str, tuple[EpisodeRequested, int, float]] = {}
        """With its position, and when it is closed by this process's clock: the server's may be set while it is played."""
        self._next_sequence = 0
        """The first log position at which what is made now can stand, as far as is known."""
        self._room = LogRoom(configuration.nats.admission)
        self._measured_from: int | None = None
        """The first log position that came after the log's size was looked at for the first time."""
        self._pools = parse_pools(configuration.run.pool)
        self._seats = build_seats(configuration)
        self._leagues = list_leagues(configuration.run)
        self._seat_limits = parse_seat_limits(configuration.episode.seat_limits)
        self._consumers = [tasks_consumer(pool) for pool in list_pools(configuration.run)]
        self.full = False
        """True while new work waits for room in the log."""

    async def wait_for_room(self, episodes: int = 1) -> None:
        """Return once the log has room for so many more, beside what those that were asked for will store."""
        since = anyio.current_time()
        while True:
            try:
                state = await self._bus.log_state(self._consumers)
                self._next_sequence = state.last_sequence + 1
                self._measured_from = self._measured_from or self._next_sequence
            except RequestUnanswered as unanswered:
                log.warning("log read failed; retrying", reason=str(unanswered))
            else:
                was_full, self.full = self.full, self._is_short(state, len(self._open), wanted=episodes)
                used, limit = state.used_bytes, state.limit_bytes
                if not self.full:
                    return
                if not was_full:
                    log.warning("log is full; admission waits for room", used_bytes=used, limit_bytes=limit)
                if not self._open and not state.unacked and anyio.current_time() - since > STUCK_SECONDS:
                    log.error("log is full, nothing is played and nothing leaves it; raise its limit with "
                              "`fleetbus init --nats-max-bytes`", used_bytes=used, limit_bytes=limit)  # fmt: skip
                    since = anyio.current_time()
            await anyio.sleep(RETRY_SECONDS)

    async def assume_size(self, episodes: int) -> None:
        """The log holds that many episodes, of which it may hold a part: what one takes, until one is measured."""
        with suppress(RequestUnanswered):
            state = await self._bus.log_state(self._consumers)
            most_entries = ENTRIES_PER_EPISODE + ENTRIES_PER_TURN * self._configuration.episode.max_turns
            self._room.assume(state.used_bytes / max(state.entries, 1) * most_entries, episodes)

    async def is_short_of_room(self) -> bool:
        """True if new work would wait for room now; False if the server does not say."""
        try:
            return self._is_short(await self._bus.log_state(self._consumers), max(len(self._open), 1))
        except RequestUnanswered:
            return False

    def _is_short(self, state: LogState, admitted: int, *, wanted: int = 0) -> bool:
        others = max(state.unacked - admitted, 0)
        return self._room.is_short(state.used_bytes, state.limit_bytes, admitted=admitted, others=others, wanted=wanted)

    def build_request(
        self,
        task: Task,
        *,
        episode_id: str,
        group_id: str,
        sample_index: int,
        group_size: int,
        split: Split,
        lineage: str,
        version: int,
        pinned: bool = False,
        temperature: float | None = None,
        opponents: Mapping[str, int] = NO_OPPONENTS,
    ) -> EpisodeRequested:
        """A request as the configuration wants it, made after `wait_for_room`; ``temperature`` overrides that of training.
        ``opponents`` are the versions that play the seats of leagues, by seat; ``version`` plays what they do not name."""
        episode, run = self._configuration.episode, self._configuration.run
        seed = hashlib.blake2b(f"{run.seed}/{episode_id}".encode(), digest_size=7).digest()
        sampling = SamplingSettings(
            temperature=episode.temperature if temperature is None else temperature,
            top_p=episode.top_p,
            top_k=episode.top_k,
            min_p=episode.min_p,
            presence_penalty=episode.presence_penalty,
            frequency_penalty=episode.frequency_penalty,
            repetition_penalty=episode.repetition_penalty,
            max_tokens=episode.max_tokens,
            seed=int.from_bytes(seed, "little"),
        )
        return EpisodeRequested(
            episode_id=episode_id,
            group_id=group_id,
            sample_index=sample_index,
            split=split,
            task=task,
            policy=run.policy,
            pinned_version=version if pinned else None,
            sampling=sampling,
            max_turns=episode.max_turns,
            max_tokens=episode.max_episode_tokens,
            deadline_ns=self._bus.now_ns() + int(self._configuration.limits.episode * 1e9),
            lineage=lineage,
            policy_version=version,
            group_size=group_size,
            earliest_sequence=self._next_sequence,
            timeout_reward=float(episode.timeout_reward) if episode.timeout_reward and split == "train" else None,
            seats=tuple(self._complete_seat(seat, sampling, opponents.get(seat.seat, version)) for seat in self._seats),
            seat_limits=self._seat_limits,
        )

    def _complete_seat(self, seat: SeatPolicy, sampling: SamplingSettings, opponent: int) -> SeatPolicy:
        if seat.seat in self._leagues:
            return msgspec.structs.replace(seat, version=opponent, sampling=sampling)
        return msgspec.structs.replace(seat, sampling=sampling) if seat.trained else seat

    async def publish(self, request: EpisodeRequested) -> StoredRequest:
        """Store a request once, even if messages are lost on the way; a learner that was replaced may have asked for it long
        ago."""
        subject = self._subjects.task(find_pool(self._pools, request.task.env), request.episode_id)
        self.track(request, _UNKNOWN)  # its result may be read before it is known to be stored
        is_refused, left_ns = True, request.deadline_ns - self._bus.now_ns()
        while True:
            try:
                stored = await self._publish_or_read_back(subject, request)
                break
            except (LogFull, PublishUnanswered, RequestUnanswered) as error:
                log.warning("request publish failed; retrying", **name_episode(request), reason=str(error))
                is_refused = is_refused and isinstance(error, LogFull)
                await anyio.sleep(RETRY_SECONDS)
                if is_refused:  # no copy of it is on its way, so it is as good as made now
                    request = await self._make_again(request, left_ns)
        if stored.result is not None:
            self.mark_answered(request.episode_id)
        elif request.episode_id in self._open:
            self.track(request, stored.sequence)
        return stored

    async def _publish_or_read_back(self, subject: str, request: EpisodeRequested) -> StoredRequest:
        payload = encode(request, subject=subject)
        try:
            return StoredRequest(
                request=request, sequence=(await self._bus.publish(subject, payload, expected_last=0)).sequence
            )
        except SequenceConflict:
            stored = await self._bus.last(subject)
            if stored is None:
                raise RequestUnanswered(f"{subject}: the replica of the log that answered does not have it yet") from None
            found = read_entry(STORED["task"], stored)
            state = await read_episode_state(self._bus, self._subjects, request.episode_id)
            return StoredRequest(
                request=found if isinstance(found, EpisodeRequested) else request,
                sequence=stored.sequence,
                result=state.result_of_claim,
            )

    async def _make_again(self, request: EpisodeRequested, left_ns: int) -> EpisodeRequested:
        """The same, with as much time as it had when it was made."""
        earliest = await self._find_next_sequence(request) if request.earliest_sequence else 0
        made = msgspec.structs.replace(request, earliest_sequence=earliest, deadline_ns=self._bus.now_ns() + left_ns)
        if self._open.pop(request.episode_id, None) is not None:
            self.track(made, _UNKNOWN)
        return made

    async def _find_next_sequence(self, request: EpisodeRequested) -> int:
        try:
            return (await self._bus.log_state()).last_sequence + 1
        except RequestUnanswered:
            return request.earliest_sequence

    def track(self, request: EpisodeRequested, sequence: int) -> None:
        """Watch a request until `mark_answered`: for no longer than an episode has, whatever the server's clock was when
        somebody else made it."""
        limits, tracked = self._configuration.limits, self._open.get(request.episode_id)
        left_seconds = min((request.deadline_ns - self._bus.now_ns()) / 1e9, limits.episode) + limits.grace
        closes_at = tracked[2] if tracked is not None else anyio.current_time() + left_seconds
        self._open[request.episode_id] = (request, sequence, closes_at)

    def mark_answered(self, episode_id: str) -> None:
        self._open.pop(episode_id, None)

    def record_result(self, sequence: int, episode_id: str) -> None:
        """A result was read at that position, of whoever's episode: those of others made the log grow, too."""
        if self._measured_from is not None and sequence >= self._measured_from:
            self._room.record_end()
        self.mark_answered(episode_id)

    async def close_expired(self, found: Callable[[EpisodeFinished], None] = lambda result: None) -> None:
        """Until cancelled, store a ``timeout`` result for every request whose deadline and grace have passed
        (docs/concepts/delivery.md, rule 9).

        ``found`` is given a result that stands there by then: it may be older than where its requester began to read results.
        """
        while True:
            await anyio.sleep(EXPIRY_CHECK_SECONDS)
            settled = await self._find_floor() if self._open else 0
            for request, sequence, closes_at in tuple(self._open.values()):
                if sequence != _UNKNOWN and (closes_at < anyio.current_time() or sequence < settled):
                    with structlog.contextvars.bound_contextvars(**name_episode(request)):
                        try:
                            await self._close(request, sequence, found)
                        except RequestUnanswered as unanswered:
                            log.warning("request close failed; retrying later", reason=str(unanswered))

    async def _close(self, request: EpisodeRequested, sequence: int, found: Callable[[EpisodeFinished], None]) -> None:
        episode_state = await read_episode_state(self._bus, self._subjects, request.episode_id)
        floor = NO_FLOOR
        if episode_state.result is not None and self.is_own_close(episode_state.result):
            subject = self._subjects.episode(request.episode_id)
            floor = await read_floor_after(self._bus, self._subjects, subject, episode_state.last_sequence)
        elif not episode_state.last_sequence:
            floor = await read_floor(self._bus, self._subjects)
        if sequence < floor.sequence:
            result = await self._find_archived(request, sequence)
            if result is None:
                log.error("result left the log before it was read; counting the episode as lost")
                error = "its result has left the log: give the recorder's archive (learner.archive)"
                result = self._build_result(request, sequence, episode_state, "lost", "trimmed", error)
        elif (stored := episode_state.result_of_claim) is not None:
            result = stored
        else:
            error = "the deadline passed and no worker stored a result"
            result = self._build_result(request, sequence, episode_state, "timeout", UNANSWERED, error)
            await store_result(self._bus, self._subjects, result, expected_last=episode_state.last_sequence)
            return  # whether it counts is known once it is read together with the floor
        self.mark_answered(request.episode_id)
        found(result)

    def is_own_close(self, result: EpisodeFinished) -> bool:
        """True if `close_expired` stored it and has yet to see that it counts: the episode, with its result, may have left
        the log just before. Then it passes on what counts instead."""
        return result.error_class == UNANSWERED and result.worker == self._worker and result.episode_id in self._open

    async def _find_floor(self) -> int:
        try:
            return (await read_floor(self._bus, self._subjects)).sequence
        except RequestUnanswered:
            return 0

    async def _find_archived(self, request: EpisodeRequested, sequence: int) -> EpisodeFinished | None:
        """A result that left the log before it was read, because this process was away."""
        folder = self._configuration.learner.archive
        if not folder:
            return None
        look = partial(find_archived_result, Path(folder), self._subjects, request.episode_id, start=sequence)
        found: EpisodeFinished | None = await self._runtime.offload(look)
        return found

    def _build_result(
        self, request: EpisodeRequested, sequence: int, state: EpisodeState, outcome: Outcome, error_class: str, error: str
    ) -> EpisodeFinished:
        return build_result_without_attempt(
            request, sequence, state, worker=self._worker, outcome=outcome, error_class=error_class, error=error
        )
