"""The Actions that results name, by their positions: from the log, and from an archive where the log was trimmed.

A trainer reads the actions of an episode here; an Action that is nowhere is an error, never an episode without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import anyio
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.concurrency.runtime import Runtime
from fleetbus.errors import RequestUnanswered, UserError
from fleetbus.log.archive_reader import read_archived_entries
from fleetbus.log.episodes import RETRY_SECONDS, decode_entries
from fleetbus_schemas import Action, EpisodeFinished, Subjects
from fleetbus_schemas.names import is_name

READS_AT_A_TIME = 32
MAX_LANES = 512
"""Environment lanes of one result: each attempt has one, and hardly any episode has ten."""

LAG_PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Before Actions that are not there are looked for again: the replica of the log that answered may lag."""

ARCHIVE_PAUSES_SECONDS = (5.0, 10.0, 20.0, 30.0)
"""The same where an archive may have them: it may be written, or copied to here, later than the log is trimmed."""

log = structlog.get_logger()


class MissingActions(UserError):
    """The log does not hold the Action at ``sequence`` of ``subject`` that a result names; the message says where it may be.

    ``is_replaced``: something else was read at that position.
    """

    def __init__(self, episode_id: str, subject: str, sequence: int, hint: str, *, is_replaced: bool = False) -> None:
        super().__init__(f"episode {episode_id}: the log has no Action at position {sequence}; {hint}")
        self.episode_id = episode_id
        self.subject = subject
        self.sequence = sequence
        self.is_replaced = is_replaced


async def read_actions(
    bus: LogBus, subjects: Subjects, results: Sequence[EpisodeFinished], *, archive: Path | None, runtime: Runtime
) -> dict[str, list[Action]]:
    """By episode the Actions that its result names, in turn order; an episode may hold others, of attempts that were cut.

    Raises `MissingActions`.
    """
    found, missing = await find_actions(bus, subjects, results, archive=archive, runtime=runtime)
    if missing:
        raise missing[0]
    return found


async def find_actions(
    bus: LogBus, subjects: Subjects, results: Sequence[EpisodeFinished], *, archive: Path | None, runtime: Runtime
) -> tuple[dict[str, list[Action]], list[MissingActions]]:
    """The Actions of those results that name nothing else, as `read_actions`; and what is missing of each of the others."""
    missing = [problem for result in results if (problem := _check_references(result)) is not None]
    refused = {problem.episode_id for problem in missing}
    results = [result for result in results if result.episode_id not in refused]
    wanted = {reference.sequence for result in results for reference in result.actions}
    entries = await _entries_of(bus, subjects, results)
    for pause in LAG_PAUSES_SECONDS + (ARCHIVE_PAUSES_SECONDS if archive is not None else ()):
        absent = wanted - set(entries)
        if absent and archive is not None:
            log.info("actions read from the archive", entries=len(absent))
            entries |= await runtime.offload(read_archived_entries, archive, absent, run=subjects.run)
        absent = wanted - set(entries)
        if not absent:
            break
        if pause in ARCHIVE_PAUSES_SECONDS:
            if await _are_all_lost(bus, subjects, results, absent):
                break
            log.warning("actions stand neither in the log nor in its archive yet; waiting", entries=len(absent), seconds=pause)
        await anyio.sleep(pause)
        entries |= await _entries_of(bus, subjects, results)
    decoded = decode_entries(Action, [entries[key] for key in wanted & set(entries)])
    actions = {(entry.sequence, entry.subject, action.turn): action for entry, action in decoded}
    found: dict[str, list[Action]] = {}
    for result in results:
        try:
            found[result.episode_id] = _actions_of(subjects, result, actions, set(entries), archive)
        except MissingActions as problem:
            missing.append(problem)
    return found, missing


async def _are_all_lost(bus: LogBus, subjects: Subjects, results: Sequence[EpisodeFinished], absent: Set[int]) -> bool:
    """True if waiting brings none of those at the positions ``absent``. False if the server does not say."""
    wanted = [(result.episode_id, each) for result in results for each in result.actions if each.sequence in absent]
    try:
        for episode_id, each in wanted:
            subject = subjects.action(each.lane, episode_id)
            if not await are_lost(bus, subjects, MissingActions(episode_id, subject, each.sequence, "")):
                return False
    except RequestUnanswered:
        return False
    return True


def _check_references(result: EpisodeFinished) -> MissingActions | None:
    """References that no log can have: a result is the word of one worker."""
    for reference in result.actions:
        if reference.sequence < 1 or not is_name(reference.lane):
            hint = f"no Action can stand there, on lane {reference.lane[:64]!r}"
            return MissingActions(result.episode_id, "", reference.sequence, hint, is_replaced=True)
    if (lanes := len({reference.lane for reference in result.actions})) > MAX_LANES:
        hint = f"the result names {lanes} lanes; {MAX_LANES} at most are read"
        return MissingActions(result.episode_id, "", result.actions[0].sequence, hint, is_replaced=True)
    return None


async def _entries_of(bus: LogBus, subjects: Subjects, results: Sequence[EpisodeFinished]) -> dict[int, StreamEntry]:
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


async def _history(bus: LogBus, subjects: list[str]) -> list[StreamEntry]:
    """However long the server is away: the batch is complete, and no other process would train it."""
    while True:
        try:
            return await bus.history(subjects)
        except RequestUnanswered as unanswered:
            log.warning("log read failed; retrying", reason=str(unanswered))
            await anyio.sleep(RETRY_SECONDS)


def _actions_of(
    subjects: Subjects,
    result: EpisodeFinished,
    actions: Mapping[tuple[int, str, int], Action],
    read: Set[int],
    archive: Path | None,
) -> list[Action]:
    """By position, subject and turn: a worker that lies may name another episode's Actions, or those of another turn."""
    found = []
    for reference in result.actions:
        subject = subjects.action(reference.lane, result.episode_id)
        action = actions.get((reference.sequence, subject, reference.turn))
        if action is None:
            is_replaced = reference.sequence in read
            if is_replaced:
                hint = "something else stands there"
            elif archive:
                hint = "nor does its archive"
            else:
                hint = "it may have been trimmed: give the recorder's archive (learner.archive)"
            raise MissingActions(result.episode_id, subject, reference.sequence, hint, is_replaced=is_replaced)
        found.append(action)
    return found


async def are_lost(bus: LogBus, subjects: Subjects, missing: MissingActions) -> bool:
    """True if the log ends before that position, or gave it to something else: it went back in time, and no archive will ever
    have the Action. One that stands there was read from a server that lags."""
    if missing.is_replaced or (await bus.log_state()).last_sequence < missing.sequence:
        return True
    found = await bus.next_entry(subjects.log, start=missing.sequence)
    return found is not None and found.sequence == missing.sequence and found.subject != missing.subject
