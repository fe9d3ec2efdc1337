"""Reading one episode back from the log: its standing, its token history, what was observed; and storing its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import anyio
import structlog

from fleetbus.bus.base import Bus, Stored
from fleetbus.core.claims import EpisodeEntry, Standing, fold_episode
from fleetbus.core.history import Turn, fold_history
from fleetbus.errors import LogFull, PublishUnanswered, SequenceConflict
from fleetbus_schemas import (
    ANY_LANE,
    Action,
    ChatMessage,
    EpisodeFinished,
    MalformedMessage,
    Message,
    Observation,
    Subjects,
    encode,
)
from fleetbus_schemas.message import M, decode_any
from fleetbus_schemas.stored import STORED

RETRY_SECONDS = 1.0

log = structlog.get_logger()


def decoded(expected: type[M], entries: Iterable[Stored], *, beside: tuple[type[Message], ...] = ()) -> list[tuple[Stored, M]]:
    """The entries that are messages of that type; those of a type ``beside`` it are passed over, others logged too."""
    types: tuple[type[Message], ...] = (expected, *beside)
    messages = []
    for entry in entries:
        message = read_entry(types, entry)
        if isinstance(message, expected):
            messages.append((entry, message))
    return messages


def read_entry(types: tuple[type[M], ...], entry: Stored) -> M | None:
    """The message in an entry; None, and logged, if it is none of these types."""
    try:
        return decode_any(types, entry.payload, subject=entry.subject)
    except MalformedMessage as malformed:
        log.warning("entry ignored", sequence=entry.sequence, reason=malformed.reason)
        return None


def episode_entry(entry: Stored) -> EpisodeEntry | None:
    """The claim, goodbye or result in an entry of ``episode.<episode>``; None if it is none of them."""
    message = read_entry(STORED["episode"], entry)
    assert message is None or isinstance(message, EpisodeEntry)
    return message


async def read_standing(bus: Bus, subjects: Subjects, episode_id: str) -> Standing:
    """Who holds the episode and how it stands, as of now."""
    entries = await bus.history([subjects.episode(episode_id)])
    return fold_episode((entry.sequence, episode_entry(entry)) for entry in entries)


async def read_turns(bus: Bus, subjects: Subjects, episode_id: str, standing: Standing) -> tuple[Turn, ...]:
    """The token history that the episode's newest claim stands on."""
    lanes = sorted({claim.lane for claim in standing.claims})
    if not lanes:
        return ()
    entries = await bus.history([subjects.action(lane, episode_id) for lane in lanes])
    turns = [
        Turn(sequence=entry.sequence, lane=entry.subject.split(".")[3], action=action)
        for entry, action in decoded(Action, entries)
    ]
    return fold_history(standing.claims, turns)


async def read_observed(
    bus: Bus, subjects: Subjects, policy: str, episode_id: str, turns: Iterable[Turn]
) -> dict[int, tuple[ChatMessage, ...]]:
    """The recorded observation messages that the given turns answered, by turn."""
    wanted = {(turn.action.attempt, turn.action.turn) for turn in turns}
    lanes = sorted({ANY_LANE, *(turn.action.lane for turn in turns if turn.action.lane)})
    entries = await bus.history([subjects.observation(policy, lane, episode_id) for lane in lanes])
    return {
        observation.turn: observation.messages
        for _, observation in decoded(Observation, entries)
        if (observation.attempt, observation.turn) in wanted
    }


async def store(bus: Bus, subject: str, message: Message, *, message_id: str) -> int:
    """Store a message however long it takes: full logs and unanswered publishes are waited out under one id.

    Returns its sequence. The caller's cancel scope is what ends it.
    """
    payload = encode(message, subject=subject)
    while True:
        try:
            return (await bus.publish(subject, payload, message_id=message_id)).sequence
        except (LogFull, PublishUnanswered) as error:
            log.warning("publish is tried again", subject=subject, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


Settled = Literal["stored", "finished", "superseded"]
"""``stored``: this result is the episode's; ``finished``: it had one already; ``superseded``: a newer claim stands there."""


async def store_result(bus: Bus, subjects: Subjects, result: EpisodeFinished, *, expected_last: int) -> Settled:
    """Store an episode's only result, unless another result or a newer claim stands there already.

    ``expected_last`` is the author's own claim, or for a poison or timeout result the last entry that it read. Only when a
    result stands in the log may the request be acked.
    """
    subject = subjects.episode(result.episode_id)
    payload = encode(result, subject=subject)
    while True:
        try:
            await bus.publish(subject, payload, expected_last=expected_last)
            return "stored"
        except SequenceConflict:
            return _settled(await read_standing(bus, subjects, result.episode_id), result)
        except (LogFull, PublishUnanswered) as error:
            log.warning("result is tried again", episode=result.episode_id, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


def _settled(standing: Standing, result: EpisodeFinished) -> Settled:
    """A refusal may be one's own first try, whose answer was lost."""
    if standing.result is None:
        return "superseded"
    return "stored" if standing.result == result else "finished"
