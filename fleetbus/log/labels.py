"""Reads and stores the labels of an episode. Above it are `fleetbus label` and the page, below it the log."""

from __future__ import annotations

from collections.abc import Iterable

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.core.episode.labels import EpisodeLabels
from fleetbus.errors import LogFull, PublishUnanswered, SequenceConflict, UserError
from fleetbus.log.episodes import read_episode_state
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import GRADED, EpisodeLabeled, Subjects, encode

TRIES = 8
"""Others may label the same episode meanwhile as often as that."""


class LabelsRefused(UserError):
    """Labels or a comment that an episode cannot have; nothing was stored."""


def fold_labels(entries: Iterable[StreamEntry]) -> EpisodeLabels:
    """The labels in the entries of one episode, in the order of the log; entries of other kinds say nothing."""
    found = EpisodeLabels()
    for entry in entries:
        if entry.subject.split(".", 3)[2] == "label" and isinstance(message := read_stored(entry), EpisodeLabeled):
            found.apply(message, entry.sequence, entry.time_ns)
    return found


async def store_labels(
    bus: LogBus, subjects: Subjects, message: EpisodeLabeled, *, archived: Iterable[StreamEntry] = ()
) -> EpisodeLabels:
    """Store what a person says of an episode, and return its labels with that. ``archived`` are the entries of the episode
    that left the log.

    Raises `LabelsRefused` for an episode that was never requested and for what it cannot have, `UserError` if the server does
    not answer. An entry expects the last one that was read here: one that comes between is read first, and one whose answer was
    lost is found there and not stored again.
    """
    subject, before = subjects.label(message.episode_id), {entry.sequence: entry for entry in archived}
    is_known = any(entry.subject.split(".", 3)[2] == "task" for entry in before.values())
    if not is_known and await bus.next_entry(subjects.task("*", message.episode_id), start=1) is None:
        raise LabelsRefused(f"there is no episode {message.episode_id} in the log of run {subjects.run}")
    if message.turn is not None and (message.add or message.comment):
        result = (await read_episode_state(bus, subjects, message.episode_id)).result
        if result is not None and result.outcome in GRADED and message.turn >= result.turns:  # others do not count all
            raise LabelsRefused(f"episode {message.episode_id} has {result.turns} turns, from 0 on: none is {message.turn}")
    payload, tried_after = encode(message, subject=subject), None
    for _ in range(TRIES):
        stored = await bus.history([subject])
        entries = before | {entry.sequence: entry for entry in stored}
        found = fold_labels(entries[sequence] for sequence in sorted(entries))
        if tried_after is not None and any(entry.payload == payload for entry in stored if entry.sequence > tried_after):
            return found
        if fault := found.find_fault(message):
            raise LabelsRefused(fault)
        tried_after = stored[-1].sequence if stored else 0
        try:
            ack = await bus.publish(subject, payload, expected_last=tried_after)
        except SequenceConflict:
            continue
        except LogFull as error:
            raise LabelsRefused(f"the log of run {subjects.run} is full: nothing was stored") from error
        except PublishUnanswered as error:
            raise UserError(
                f"the server did not say if it stored the labels of episode {message.episode_id}: look before you repeat it"
            ) from error
        found.apply(message, ack.sequence, bus.now_ns())
        return found
    raise LabelsRefused(f"others changed the labels of episode {message.episode_id} {TRIES} times meanwhile: try again")
