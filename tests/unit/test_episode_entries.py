"""Entries of episodes as all roles read them, and messages as they are stored: what another key's holder can spoil."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import PublishUnanswered
from fleetbus.log.episodes import decode_episode_entry, read_episode_state, read_turns, store_message
from fleetbus_schemas import AttemptReleased, AttemptStarted, EpisodeFinished, Message, Subjects, encode

pytestmark = pytest.mark.anyio

SUBJECTS = Subjects("entries")
CLAIM = AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="e0")


def finished(episode: str) -> EpisodeFinished:
    return EpisodeFinished(episode_id=episode, group_id="g", attempt=1, outcome="completed", worker="w", reward=1.0)


@pytest.mark.parametrize(
    "message",
    [
        finished("other"),
        AttemptStarted(episode_id="other", attempt=1, worker="w", nonce="n", lane="e0"),
        AttemptReleased(episode_id="other", attempt=1, worker="w"),
        AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="e0.>"),
    ],
)
def test_an_entry_that_speaks_for_another_episode_or_names_no_lane_is_ignored(message: Message) -> None:
    """A result for an episode, stored elsewhere, would be trained past what that episode's claims refuse."""
    assert (
        decode_episode_entry(StreamEntry(sequence=7, subject=SUBJECTS.episode("e"), payload=encode(message), time_ns=0)) is None
    )


def test_entries_of_their_own_subject_are_read() -> None:
    for message in (CLAIM, AttemptReleased(episode_id="e", attempt=1, worker="w"), finished("e")):
        entry = StreamEntry(sequence=7, subject=SUBJECTS.episode("e"), payload=encode(message), time_ns=0)
        assert decode_episode_entry(entry) == message


async def test_an_episode_goes_on_behind_a_claim_whose_lane_is_no_name() -> None:
    """Whoever read its turns ended of it."""
    async with MemoryServer().connect("entries") as bus:
        await bus.declare(plan_run("entries", lanes=1))
        forged = AttemptStarted(episode_id="e", attempt=1, worker="x", nonce="x", lane=" ")
        for message in (forged, CLAIM):
            await bus.publish(SUBJECTS.episode("e"), encode(message))
        state = await read_episode_state(bus, SUBJECTS, "e")
        assert state.claims == (CLAIM,)
        assert await read_turns(bus, SUBJECTS, "e", state) == ()


async def test_a_message_is_stored_under_an_id_of_its_own_which_its_repetitions_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could foresee the id could store an entry under it first, and the message would count as its repetition."""
    ids: list[str] = []
    async with MemoryServer().connect("entries") as bus:
        await bus.declare(plan_run("entries", lanes=1))
        publish = bus.publish

        async def publish_once_in_vain(self: MemoryBus, subject: str, payload: bytes, *, message_id: str) -> Any:
            ids.append(message_id)
            receipt = await publish(subject, payload, message_id=message_id)
            if len(ids) == 1:
                raise PublishUnanswered("the answer was lost")
            return receipt

        monkeypatch.setattr(MemoryBus, "publish", publish_once_in_vain)
        monkeypatch.setattr("fleetbus.log.episodes.RETRY_SECONDS", 0.0)
        positions = [await store_message(bus, SUBJECTS.episode("e"), CLAIM) for _ in range(2)]
    assert positions == [1, 2]
    assert ids[0] == ids[1] != ids[2]
