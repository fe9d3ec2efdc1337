"""The Actions that results name, by their positions: from the log, and from an archive where the log was trimmed.

A trainer reads the actions of an episode here; an Action that is nowhere is an error, never an episode without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import structlog

from fleetbus.archive import read_archived_entries
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.episodes import RETRY_SECONDS, decode_entries
from fleetbus.errors import RequestUnanswered, UserError
from fleetbus.runtime import Runtime
from fleetbus_schemas import Action, EpisodeFinished, Subjects

READS_AT_A_TIME = 32
LAG_PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Before Actions that are not there are looked for again: the replica of the log that answered may lag."""

log = structlog.get_logger()


class MissingActions(UserError):
    """The log does not hold the Action at ``sequence`` that a result names; the message says where it may be."""

    def __init__(self, episode_id: str, sequence: int, hint: str) -> None:
        super().__init__(f"episode {episode_id}: the log has no Action at position {sequence}; {hint}")
        self.episode_id = episode_id
        self.sequence = sequence


async def read_actions(
    bus: Bus, subjects: Subjects, results: Sequence[EpisodeFinished], *, archive: Path | None, runtime: Runtime
) -> dict[str, list[Action]]:
    """By episode the Actions that its result names, in turn order; an episode may hold others, of attempts that were cut."""
    wanted = {reference.sequence for result in results for reference in result.actions}
    entries = await _entries_of(bus, subjects, results)
    for pause in LAG_PAUSES_SECONDS:
        missing = wanted - set(entries)
        if missing and archive is not None:
            log.info("actions read from the archive", entries=len(missing))
            entries |= await runtime.offload(read_archived_entries, archive, missing, run=subjects.run)
        if not wanted - set(entries):
            break
        await anyio.sleep(pause)
        entries |= await _entries_of(bus, subjects, results)
    actions = {
        entry.sequence: action for entry, action in decode_entries(Action, [entries[key] for key in wanted & set(entries)])
    }
    return {result.episode_id: _actions_of(result, actions, archive) for result in results}


async def _entries_of(bus: Bus, subjects: Subjects, results: Sequence[EpisodeFinished]) -> dict[int, StreamEntry]:
    """By position what stands on the subjects of the episodes' Actions."""
    entries: dict[int, StreamEntry] = {}
    limiter = anyio.CapacityLimiter(READS_AT_A_TIME)

    async def read(result: EpisodeFinished) -> None:
        lanes = sorted({reference.lane for reference in result.actions})
        async with limiter:
            found = await _history(bus, [subjects.action(lane, result.episode_id) for lane in lanes])
        entries.update((entry.sequence, entry) for entry in found)

    async with anyio.create_task_group() as group:
        for result in results:
            group.start_soon(read, result)
    return entries


async def _history(bus: Bus, subjects: list[str]) -> list[StreamEntry]:
    """However long the server is away: the batch is complete, and no other process would train it."""
    while True:
        try:
            return await bus.history(subjects)
        except RequestUnanswered as unanswered:
            log.warning("log read failed; retrying", reason=str(unanswered))
            await anyio.sleep(RETRY_SECONDS)


def _actions_of(result: EpisodeFinished, actions: Mapping[int, Action], archive: Path | None) -> list[Action]:
    try:
        return [actions[reference.sequence] for reference in result.actions]
    except KeyError as missing:
        hint = "nor does its archive" if archive else "it may have been trimmed: give the recorder's archive (learner.archive)"
        raise MissingActions(result.episode_id, missing.args[0], hint) from missing


async def are_lost(bus: Bus, subjects: Subjects, missing: MissingActions) -> bool:
    """Whether the log ends before that position, or gave it to something else: it went back in time, and no archive will ever
    have the Action. One that stands there was read from a server that lags."""
    if await bus.last_sequence() < missing.sequence:
        return True
    found = await bus.next_entry(subjects.log, start=missing.sequence)
    if found is None or found.sequence != missing.sequence:
        return False
    kind, episode_id = found.subject.split(".", 3)[2], found.subject.rpartition(".")[2]
    return (kind, episode_id) != ("act", missing.episode_id)
