"""An inference worker's histories: kept by hash, dropped when it differs, rebuilt from the log, refused when they must be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    Message,
    Observation,
    ShownImage,
    Subjects,
    ToolSpec,
    encode,
)
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history, pack_ids
from fleetbus_workers.inference.history_cache import (
    LONGEST_LAG_SECONDS,
    REBUILD_PAUSE_SECONDS,
    History,
    HistoryCache,
    HistoryMismatch,
    StaleObservation,
)
from tests.support.virtual_time import virtual_time

RUN = "h"
SUBJECTS = Subjects(RUN)

anyio_backend = virtual_time


class Log:
    """One episode in a log: claims, Actions and the result as they are written, and the hash after each turn."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.hashes = {(1, -1): EMPTY_HISTORY}

    async def claim(self, attempt: int, *, resumed_at: int = 0) -> None:
        claim = AttemptStarted(
            episode_id="e", attempt=attempt, worker="w", nonce=f"n{attempt}", lane=f"e{attempt}", resumed_at_turn=resumed_at
        )
        self.hashes[attempt, resumed_at - 1] = self.hashes.get((attempt - 1, resumed_at - 1), EMPTY_HISTORY)
        await self._store(SUBJECTS.episode("e"), claim)

    async def act(self, attempt: int, turn: int, delta: list[int], sampled: list[int], *images: ShownImage) -> None:
        shown = [image.object for image in images]
        digest = extend_history(self.hashes[attempt, turn - 1], pack_ids(delta), pack_ids(sampled), shown)
        self.hashes[attempt, turn] = digest
        action = Action(
            episode_id="e",
            attempt=attempt,
            turn=turn,
            text="",
            prompt_delta=pack_ids(delta),
            sampled=pack_ids(sampled),
            history_hash=digest,
            images=images,
        )
        await self._store(SUBJECTS.action(f"e{attempt}", "e"), action)

    async def finish(self) -> None:
        result = EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker="w", reward=1.0)
        await self._store(SUBJECTS.episode("e"), result)

    async def _store(self, subject: str, message: Message) -> None:
        await self.bus.publish(subject, encode(message))

    def observation(self, attempt: int, turn: int, *, history_hash: bytes | None = None) -> Observation:
        return Observation(
            episode_id="e",
            attempt=attempt,
            turn=turn,
            policy="default",
            messages=(),
            tokens_left=100,
            history_hash=self.hashes[attempt, turn - 1] if history_hash is None else history_hash,
            environment_lane=f"e{attempt}",
            deadline_ns=0,
        )


@asynccontextmanager
async def log_and_histories() -> AsyncIterator[tuple[Log, HistoryCache]]:
    server = MemoryServer()
    async with server.connect(RUN, worker="w") as bus:
        await bus.declare(plan_run(RUN, lanes=4))
        yield Log(bus), HistoryCache(bus, SUBJECTS)


async def test_the_first_turn_needs_no_log() -> None:
    async with log_and_histories() as (log, histories):
        history = await histories.take_or_rebuild(log.observation(1, 0))
        assert (history.digest, history.ids, histories.rebuilt) == (EMPTY_HISTORY, [], 0)


async def test_what_is_kept_under_the_right_hash_is_given_away_once_and_then_rebuilt_alike() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1, 2], [3])
        observation = log.observation(1, 1)
        histories.put("e", History(digest=observation.history_hash, ids=[1, 2, 3]))
        kept = await histories.take_or_rebuild(observation)
        rebuilt = await histories.take_or_rebuild(observation)
        assert kept == rebuilt == History(digest=observation.history_hash, ids=[1, 2, 3])
        assert histories.rebuilt == 1


async def test_what_is_kept_under_another_hash_is_dropped_and_rebuilt_from_the_log() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1, 2], [3])
        await log.act(1, 1, [4], [5, 6])
        histories.put("e", History(digest=b"what I thought", ids=[9, 9, 9]))
        assert (await histories.take_or_rebuild(log.observation(1, 2))).ids == [1, 2, 3, 4, 5, 6]
        assert histories.rebuilt == 1


async def test_a_repeated_observation_stands_on_less_than_the_log_holds_by_now() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        await log.act(1, 1, [3], [4])
        assert (await histories.take_or_rebuild(log.observation(1, 1))).ids == [1, 2]


async def test_turns_of_several_attempts_are_rebuilt_as_the_claims_say() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        await log.act(1, 1, [3], [4])
        await log.claim(2, resumed_at=1)
        await log.act(1, 2, [99], [99])  # of the attempt before, which does not know yet
        await log.act(2, 1, [5], [6])
        assert (await histories.take_or_rebuild(log.observation(2, 2))).ids == [1, 2, 5, 6]


async def test_the_images_of_a_history_are_rebuilt_with_their_places() -> None:
    first, second = (ShownImage(object=name * 64, start=1, stop=3) for name in "ab")
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1, 9, 9], [2], first)
        await log.act(1, 1, [3, 9, 9, 4], [5], second)
        rebuilt = await histories.take_or_rebuild(log.observation(1, 2))
        assert rebuilt.images == (first, ShownImage(object="b" * 64, start=5, stop=7))
        assert rebuilt.ids == [1, 9, 9, 2, 3, 9, 9, 4, 5]


async def test_a_history_that_the_log_does_not_contain_is_refused_after_two_looks() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        started = anyio.current_time()
        with pytest.raises(HistoryMismatch, match="turn 1 of e"):
            await histories.take_or_rebuild(log.observation(1, 1, history_hash=b"somewhere else"))
        assert anyio.current_time() - started == pytest.approx(REBUILD_PAUSE_SECONDS)


async def test_an_action_that_the_log_shows_a_moment_later_is_waited_for() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        digest = extend_history(EMPTY_HISTORY, pack_ids([1]), pack_ids([2]))

        async def act_later() -> None:
            await anyio.sleep(REBUILD_PAUSE_SECONDS / 2)
            await log.act(1, 0, [1], [2])

        async with anyio.create_task_group() as group:
            group.start_soon(act_later)
            assert (await histories.take_or_rebuild(log.observation(1, 1, history_hash=digest))).ids == [1, 2]


@pytest.mark.parametrize("lags", ["before the claim", "before the Action", "before the claim of the attempt before"])
async def test_a_read_from_before_what_an_observation_stands_on_is_repeated(lags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acked as stale, the observation would be answered by nobody: its worker waits for the Action."""
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        await log.act(1, 1, [3], [4])
        await log.claim(2, resumed_at=2)
        await log.act(2, 2, [5], [6])
        history, knows = log.bus.history, {"before the claim": 3, "before the Action": 4}.get(lags, 0)

        async def lagging(subjects: Sequence[str]) -> list[StreamEntry]:
            behind = knows if anyio.current_time() < 10 else 5
            return [entry for entry in await history(subjects) if entry.sequence <= behind]

        monkeypatch.setattr(log.bus, "history", lagging)
        assert (await histories.take_or_rebuild(log.observation(2, 3))).ids == [1, 2, 3, 4, 5, 6]


async def test_what_no_replica_shows_for_long_is_not_in_the_log_any_more() -> None:
    async with log_and_histories() as (log, histories):
        with pytest.raises(HistoryMismatch):
            await histories.take_or_rebuild(log.observation(1, 1, history_hash=b"some history"))
        assert anyio.current_time() == pytest.approx(LONGEST_LAG_SECONDS, abs=1)


@pytest.mark.parametrize("what", ["a newer claim", "a result"])
async def test_an_observation_that_nobody_waits_for_is_stale(what: str) -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        if what == "a newer claim":
            await log.claim(2)
        if what == "a result":
            await log.finish()
        with pytest.raises(StaleObservation):
            await histories.take_or_rebuild(log.observation(1, 1, history_hash=b"some history"))


async def test_the_least_recently_used_history_is_dropped_first() -> None:
    async with log_and_histories() as (log, _):
        histories = HistoryCache(log.bus, SUBJECTS, limit=2, limit_packed_bytes=0)
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        observation = log.observation(1, 1)
        histories.put("e", History(digest=observation.history_hash, ids=[1, 2]))
        histories.put("f", History(digest=b"f", ids=[]))
        histories.put("g", History(digest=b"g", ids=[]))
        await histories.take_or_rebuild(observation)
        assert histories.rebuilt == 1, "it was still kept"


async def test_a_forgotten_history_is_rebuilt() -> None:
    async with log_and_histories() as (log, histories):
        await log.claim(1)
        await log.act(1, 0, [1], [2])
        observation = log.observation(1, 1)
        histories.put("e", History(digest=observation.history_hash, ids=[1, 2]))
        histories.forget("e")
        assert (await histories.take_or_rebuild(observation)).ids == [1, 2]
        assert histories.rebuilt == 1


def make_history(name: str, ids: list[int]) -> History:
    """With something in each of its parts."""
    tool = ToolSpec(name="look", parameters={"type": "object", "maximum": 1 << 70})
    shown = ShownImage(object=name * 64, start=1, stop=3)
    said = ChatMessage(role="user", content=f"of {name} \0 \u4e2d")
    return History(digest=name.encode(), ids=ids, calls=3, images=(shown,), tools=(tool,), messages=(said,))


async def test_what_is_used_least_recently_is_packed_before_it_is_dropped() -> None:
    """The bound that matters for memory is token ids: 4,096 episodes of 32,768 would take 5 GB as lists."""
    async with log_and_histories() as (log, _):
        histories = HistoryCache(log.bus, SUBJECTS, limit_ids=100, limit_packed_bytes=1200)
        kept = {"a": [10] * 30, "b": [11] * 50, "c": [1 << 31] * 50, "d": [13] * 40}
        for episode, ids in kept.items():
            histories.put(episode, make_history(episode, list(ids)))
        assert (list(histories._packed), list(histories._entries)) == (["b"], ["c", "d"]), "a and b are over the second bound"
        found = {episode: histories.forget(episode) for episode in kept}
        assert found == {"a": None} | {episode: make_history(episode, kept[episode]) for episode in "bcd"}
        histories.put("long", History(digest=b"", ids=[7] * 400))
        histories.put("long", History(digest=b"", ids=[7] * 500))
        assert histories.forget("long") is not None, "the newest is kept whatever its length"
        assert (histories._entry_id_count, histories._packed_bytes) == (0, 0)


async def test_short_histories_with_long_tools_take_no_more_memory_than_the_bounds_say() -> None:
    """Every episode that ended is kept until others need its place; counted by its ids alone, 200,000 would take 5 GB."""
    async with log_and_histories() as (log, _):
        histories = HistoryCache(log.bus, SUBJECTS, limit=10, limit_packed_bytes=1 << 20)
        tools = (ToolSpec(name="look", description="x" * 50_000),)
        for number in range(100):
            histories.put(f"e{number}", History(digest=b"", ids=[1], tools=tools))
        assert len(histories._entries) == 10
        assert 15 < len(histories._packed) < 21
        assert histories.forget("e85") == History(digest=b"", ids=[1], tools=tools)


async def test_histories_over_the_bound_of_lists_are_used_without_a_read_of_the_log() -> None:
    """Each step of each session would read its whole episode otherwise: 64 sessions of 130,000 tokens stood still."""
    async with log_and_histories() as (log, _):
        histories = HistoryCache(log.bus, SUBJECTS, limit_ids=1)
        await log.claim(1)
        await log.act(1, 0, [1, 2], [3])
        observation = log.observation(1, 1)
        histories.put("e", History(digest=observation.history_hash, ids=[1, 2, 3]))
        histories.put("f", History(digest=b"f", ids=[]))
        taken = await histories.take_or_rebuild(observation)
        assert (taken.ids, histories.rebuilt) == ([1, 2, 3], 0)
