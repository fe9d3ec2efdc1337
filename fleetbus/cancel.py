"""Ends episodes and workers on an operator's word: what runs somewhere is ended there, what runs nowhere is closed in the log.

The log says who holds an episode, so exactly that worker is asked. Whatever else happens meanwhile, compare-and-set leaves an
episode with one result. Above it is the command line.
"""

from __future__ import annotations

from typing import Literal, get_args

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.core.claims import Standing, result_without_attempt
from fleetbus.episodes import episode_entry, read_standing, store_result
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import (
    ControlAnswered,
    ControlRequested,
    EpisodeFinished,
    EpisodeRequested,
    MalformedMessage,
    Subjects,
    WorkerRole,
    decode,
    encode,
)

ANSWER_SECONDS = 2.5
TRIES = 8
"""Claims may come in between as often as that."""

State = Literal["cancelled", "over", "closing", "open", "unknown"]


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one episode: ``cancelled`` now by ``worker``; ``over`` before, with ``outcome``; ``closing``: its worker
    has stopped it and has not stored the result yet; ``open``: it changed hands all the time; ``unknown``: never requested."""

    episode_id: str
    state: State
    worker: str = ""
    outcome: str = ""


async def cancel_episode(bus: Bus, subjects: Subjects, episode_id: str, *, author: str, close_seconds: float) -> Cancelled:
    """End one episode. ``close_seconds`` is how long its worker may take to close the environment and say so."""
    requested = await _request(bus, subjects, episode_id)
    if requested is None:
        return Cancelled(episode_id=episode_id, state="unknown")
    request, sequence = requested
    for _ in range(TRIES):
        standing = await read_standing(bus, subjects, episode_id)
        if standing.result is not None:
            return Cancelled(episode_id=episode_id, state="over", outcome=standing.result.outcome)
        if await _is_stopping(bus, subjects, standing, episode_id):
            return await _closed(bus, subjects, standing, episode_id, close_seconds)
        result = result_without_attempt(
            request, sequence, standing, worker=author, outcome="cancelled", error_class="cancelled"
        )
        if await store_result(bus, subjects, result, expected_last=standing.last_sequence) == "stored":
            return Cancelled(episode_id=episode_id, state="cancelled", worker=author, outcome="cancelled")
    return Cancelled(episode_id=episode_id, state="open")


async def drain_worker(bus: Bus, subjects: Subjects, worker: str) -> WorkerRole | None:
    """Ask a worker to drain; returns its role, None if nobody has that name. Raises `RequestUnanswered` if it hangs."""
    for role in get_args(WorkerRole):
        try:
            question = encode(ControlRequested(command="drain"))
            await bus.request(subjects.control(role, worker), question, timeout=ANSWER_SECONDS)
        except NoResponders:
            continue
        found: WorkerRole = role
        return found
    return None


async def _request(bus: Bus, subjects: Subjects, episode_id: str) -> tuple[EpisodeRequested, int] | None:
    """The episode's request in whatever pool, and its position."""
    entry = await bus.next_entry(subjects.task("*", episode_id), start=1)
    if entry is None:
        return None
    try:
        return decode(EpisodeRequested, entry.payload, subject=entry.subject), entry.sequence
    except MalformedMessage:
        return None


async def _is_stopping(bus: Bus, subjects: Subjects, standing: Standing, episode_id: str) -> bool:
    """True if the worker that holds the episode says that it has stopped it."""
    newest = standing.newest
    if newest is None or standing.released:
        return False
    subject = subjects.control("environment", newest.worker)
    question = encode(ControlRequested(command="cancel", episodes=(episode_id,)))
    try:
        answer = await bus.request(subject, question, timeout=ANSWER_SECONDS)
        return episode_id in decode(ControlAnswered, answer, subject=subject).detail.split(",")
    except (NoResponders, RequestUnanswered, MalformedMessage):
        return False


async def _closed(bus: Bus, subjects: Subjects, standing: Standing, episode_id: str, seconds: float) -> Cancelled:
    """Wait for the result of the worker that is stopping the episode."""
    with anyio.move_on_after(seconds):
        async with bus.read([subjects.episode(episode_id)], start=standing.last_sequence + 1) as reader:
            while True:
                result = episode_entry(await reader.receive())
                if isinstance(result, EpisodeFinished):
                    state: State = "cancelled" if result.outcome == "cancelled" else "over"
                    return Cancelled(episode_id=episode_id, state=state, worker=result.worker, outcome=result.outcome)
    newest = standing.newest
    return Cancelled(episode_id=episode_id, state="closing", worker=newest.worker if newest else "")
