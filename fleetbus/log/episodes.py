"""Reading one episode back from the log: its standing, its token history, what was observed; and storing its result."""

import os
from collections.abc import AsyncIterator, Iterable
from typing import Literal

import anyio
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.core.episode.claim_seals import ClaimSeals
from fleetbus.core.episode.claims import EpisodeEntry, EpisodeState, build_unstorable_result, fold_episode
from fleetbus.core.episode.history import Turn, fold_history
from fleetbus.errors import LogFull, PublishUnanswered, SequenceConflict
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import ANY_LANE, Action, EpisodeFinished, MalformedMessage, Message, Observation, Subjects, encode
from fleetbus_schemas.message import M, decode_any

RETRY_SECONDS = 1.0

log = structlog.get_logger()


def decode_entries(
    expected: type[M], entries: Iterable[StreamEntry], *, beside: tuple[type[Message], ...] = ()
) -> list[tuple[StreamEntry, M]]:
    """The entries that are messages of that type; those of a type ``beside`` it are passed over, others logged too."""
    types: tuple[type[Message], ...] = (expected, *beside)
    messages = []
    for entry in entries:
        message = read_entry(types, entry)
        if isinstance(message, expected):
            messages.append((entry, message))
    return messages


def read_entry(types: tuple[type[M], ...], entry: StreamEntry) -> M | None:
    """The message in an entry; None, and logged, if it is none of these types."""
    try:
        return decode_any(types, entry.payload, subject=entry.subject)
    except MalformedMessage as malformed:
        log.warning("entry is malformed; ignoring it", sequence=entry.sequence, reason=malformed.reason)
        return None


def decode_episode_entry(entry: StreamEntry) -> EpisodeEntry | None:
    """The claim, release or result in an entry of ``episode.<episode>``; None if it is none of them."""
    message = read_stored(entry)
    assert message is None or isinstance(message, EpisodeEntry)
    return message


async def read_episode_state(bus: LogBus, subjects: Subjects, episode_id: str) -> EpisodeState:
    """Read the holder and the state of the episode, as of now."""
    entries = await bus.history([subjects.episode(episode_id)])
    return fold_episode((entry.sequence, decode_episode_entry(entry)) for entry in entries)


async def read_turns(bus: LogBus, subjects: Subjects, episode_id: str, episode_state: EpisodeState) -> tuple[Turn, ...]:
    """The token history that the episode's newest claim stands on."""
    lanes = sorted({claim.lane for claim in episode_state.claims})
    if not lanes:
        return ()
    entries = await bus.history([subjects.action(lane, episode_id) for lane in lanes])
    turns = [
        Turn(sequence=entry.sequence, lane=entry.subject.split(".")[3], action=action)
        for entry, action in decode_entries(Action, entries)
    ]
    return fold_history(episode_state.claims, turns)


async def read_answered_observations(
    bus: LogBus, subjects: Subjects, policies: Iterable[str], episode_id: str, turns: Iterable[Turn]
) -> dict[int, Observation]:
    """The recorded observations of these policies that the given turns answered, by turn."""
    if not (turns := tuple(turns)):
        return {}
    wanted = {(turn.action.attempt, turn.action.turn) for turn in turns}
    lanes = sorted({ANY_LANE, *(turn.action.lane for turn in turns if turn.action.lane)})
    entries = await bus.history([subjects.observation(policy, lane, episode_id) for policy in policies for lane in lanes])
    return {
        observation.turn: observation
        for _, observation in decode_entries(Observation, entries)
        if (observation.attempt, observation.turn) in wanted
    }


async def store_message(bus: LogBus, subject: str, message: Message) -> int:
    """Store a message however long it takes: full logs and unanswered publishes are waited out under one id, which nobody can
    foresee: who stores an entry under another's id first keeps that one's out of the log.

    Returns its sequence. The caller's cancel scope is what ends it.
    """
    payload, message_id = encode(message, subject=subject), os.urandom(10).hex()
    while True:
        try:
            return (await bus.publish(subject, payload, message_id=message_id)).sequence
        except (LogFull, PublishUnanswered) as error:
            log.warning("publish failed; retrying", subject=subject, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


StoreOutcome = Literal["stored", "finished", "superseded"]
"""``stored``: this result is the episode's; ``finished``: it had one already; ``superseded``: a newer claim stands there."""


async def store_result(bus: LogBus, subjects: Subjects, result: EpisodeFinished, *, expected_last: int) -> StoreOutcome:
    """Store an episode's only result, unless another result or a newer claim stands there already.

    ``expected_last`` is the author's own claim, or for a poison or timeout result the last entry that it read. Only when a
    result stands in the log may the request be acked.
    """
    subject = subjects.episode(result.episode_id)
    try:
        payload = encode(result, subject=subject)
    except MalformedMessage as malformed:  # again and again, for the next worker would come to the same result
        log.error("result cannot be stored; storing that instead", episode=result.episode_id, reason=malformed.reason)
        payload = encode(build_unstorable_result(result, malformed.reason), subject=subject)
    while True:
        try:
            await bus.publish(subject, payload, expected_last=expected_last)
            return "stored"
        except SequenceConflict:
            episode_state = await read_episode_state(bus, subjects, result.episode_id)
            if not _is_still_held(episode_state, result) or episode_state.last_sequence <= expected_last:
                return _classify_conflict(episode_state, result)
            log.warning("an entry behind the claim is malformed; storing the result after it", episode=result.episode_id)
            expected_last = episode_state.last_sequence
        except (LogFull, PublishUnanswered) as error:
            log.warning("result publish failed; retrying", episode=result.episode_id, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


def _is_still_held(episode_state: EpisodeState, result: EpisodeFinished) -> bool:
    """Nothing has come that says anything: no result, claim or release."""
    return episode_state.result is None and episode_state.attempts == result.attempt and not episode_state.released


def _classify_conflict(episode_state: EpisodeState, result: EpisodeFinished) -> StoreOutcome:
    """A refusal may be one's own first try, whose answer was lost."""
    if episode_state.result is None:
        return "superseded"
    return "stored" if episode_state.result == result else "finished"


async def scan_training_results(
    bus: LogBus, subjects: Subjects, *, start: int
) -> AsyncIterator[tuple[int, EpisodeFinished, bool]]:
    """Every result of training that stands in the log from ``start`` on, by now, its position, and whether it is of the process
    that had claimed the episode."""
    seals = ClaimSeals()
    async for stored in bus.scan([subjects.episodes], start=start):
        entry = decode_episode_entry(stored)
        is_of_claim = seals.enter(entry)
        if isinstance(entry, EpisodeFinished) and entry.split == "train":
            yield stored.sequence, entry, is_of_claim
