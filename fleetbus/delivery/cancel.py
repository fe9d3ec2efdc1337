"""Operations on a run: cancel episodes, drain workers, pause admission. Above it are the command line and the page.

A running episode is cancelled at its worker, any other is closed in the log. The log says who holds an episode, so exactly that
worker is asked. In all races meanwhile compare-and-set leaves an episode with one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import msgspec

from fleetbus.bus.base import Bus, CallBus, LogBus
from fleetbus.core.episode.claims import EpisodeState, build_result_without_attempt
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus.log.episodes import decode_episode_entry, read_episode_state, store_result
from fleetbus.log.operations import record_operation
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
from fleetbus_schemas.channels import WORKERS

ANSWER_SECONDS = 2.5
TRIES = 8
"""Claims may come in between as often as that."""

AT_A_TIME = 16

ASKED_BY = "asked for by "
AUTHOR_LETTERS = 200

State = Literal["cancelled", "over", "closing", "open", "unknown"]


class CancelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The effect on one episode: ``cancelled`` now by ``worker``; ``over`` before, with ``outcome``; ``closing``: its worker
    has stopped it and has not stored the result yet; ``open``: its claims kept changing; ``unknown``: never requested."""

    episode_id: str
    state: State
    worker: str = ""
    outcome: str = ""


async def cancel_episode(bus: Bus, subjects: Subjects, episode_id: str, *, author: str, close_seconds: float) -> CancelResult:
    """End one episode. ``close_seconds`` is how long its worker may take to close the environment and say so."""
    requested = await _find_request(bus, subjects, episode_id)
    if requested is None:
        return CancelResult(episode_id=episode_id, state="unknown")
    request, sequence = requested
    for _ in range(TRIES):
        episode_state = await read_episode_state(bus, subjects, episode_id)
        if episode_state.result is not None:
            return CancelResult(episode_id=episode_id, state="over", outcome=episode_state.result.outcome)
        if await _is_stopping(bus, subjects, episode_state, episode_id, author):
            return await _wait_for_result(bus, subjects, episode_state, episode_id, close_seconds)
        result = build_result_without_attempt(
            request,
            sequence,
            episode_state,
            worker=author,
            outcome="cancelled",
            error_class="cancelled",
            error=describe_author(author),
        )
        if await store_result(bus, subjects, result, expected_last=episode_state.last_sequence) == "stored":
            return CancelResult(episode_id=episode_id, state="cancelled", worker=author, outcome="cancelled")
    return CancelResult(episode_id=episode_id, state="open")


async def cancel_episodes(
    bus: Bus, subjects: Subjects, episodes: Sequence[str], *, author: str, close_seconds: float
) -> list[CancelResult]:
    """`cancel_episode` for several at a time, which stands in the log before; the results in the order of ``episodes``."""
    await record_operation(bus, subjects, "cancel", list(dict.fromkeys(episodes)), author=author)
    found: dict[str, CancelResult] = {}
    limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def cancel(episode: str) -> None:
        async with limiter:
            found[episode] = await cancel_episode(bus, subjects, episode, author=author, close_seconds=close_seconds)

    async with anyio.create_task_group() as group:
        for episode in dict.fromkeys(episodes):
            group.start_soon(cancel, episode)
    return [found[episode] for episode in episodes]


async def drain_workers(bus: Bus, subjects: Subjects, workers: Sequence[str], *, author: str = "") -> dict[str, str]:
    """Ask workers to drain, which stands in the log before; the role of each, or ``unknown`` or ``unanswered``."""
    await record_operation(bus, subjects, "drain", workers, author=author)
    states: dict[str, str] = {}
    for worker in workers:
        try:
            states[worker] = await drain_worker(bus, subjects, worker) or "unknown"
        except RequestUnanswered:
            states[worker] = "unanswered"
    return states


async def pause_admission(bus: Bus, subjects: Subjects, *, is_paused: bool, author: str = "") -> str | None:
    """Ask the learner to request no new groups, or to continue, which stands in the log before; returns its name, None without
    a learner. Raises `RequestUnanswered` if it does not answer, as one of an earlier version."""
    command: Literal["pause", "resume"] = "pause" if is_paused else "resume"
    await record_operation(bus, subjects, command, author=author)
    subject = subjects.control("learner", "all", command)
    question = encode(ControlRequested(command=command))
    try:
        answer = await bus.request(subject, question, timeout=ANSWER_SECONDS)
    except NoResponders:
        return None
    return decode(ControlAnswered, answer, subject=subject).worker


async def drain_worker(bus: CallBus, subjects: Subjects, worker: str) -> WorkerRole | None:
    """Ask a worker to drain; returns its role, None if no worker has that name. Raises `RequestUnanswered` if it hangs."""
    for role in WORKERS:
        try:
            question = encode(ControlRequested(command="drain"))
            await bus.request(subjects.control(role, worker, "drain"), question, timeout=ANSWER_SECONDS)
        except NoResponders:
            continue
        return role
    return None


async def _find_request(bus: LogBus, subjects: Subjects, episode_id: str) -> tuple[EpisodeRequested, int] | None:
    """The episode's request in any pool, and its position."""
    entry = await bus.next_entry(subjects.task("*", episode_id), start=1)
    if entry is None:
        return None
    try:
        return decode(EpisodeRequested, entry.payload, subject=entry.subject), entry.sequence
    except MalformedMessage:
        return None


def describe_author(author: str) -> str:
    """The error of a cancelled episode: who asked, as far as that can be shown; empty if nobody says."""
    shown = "".join(letter for letter in author[:AUTHOR_LETTERS] if letter.isprintable())
    return f"{ASKED_BY}{shown}" if shown else ""


async def _is_stopping(bus: CallBus, subjects: Subjects, episode_state: EpisodeState, episode_id: str, author: str) -> bool:
    """True if the worker that holds the episode says that it has stopped it."""
    newest = episode_state.newest
    if newest is None or episode_state.released:
        return False
    subject = subjects.control("environment", newest.worker, "cancel")
    question = encode(ControlRequested(command="cancel", episodes=(episode_id,), author=author))
    try:
        answer = await bus.request(subject, question, timeout=ANSWER_SECONDS)
        return episode_id in decode(ControlAnswered, answer, subject=subject).detail.split(",")
    except (NoResponders, RequestUnanswered, MalformedMessage):
        return False


async def _wait_for_result(
    bus: LogBus, subjects: Subjects, episode_state: EpisodeState, episode_id: str, seconds: float
) -> CancelResult:
    """Wait for the result of the worker that is stopping the episode."""
    with anyio.move_on_after(seconds):
        async with bus.read([subjects.episode(episode_id)], start=episode_state.last_sequence + 1) as reader:
            while True:
                result = decode_episode_entry(await reader.receive())
                if isinstance(result, EpisodeFinished):
                    state: State = "cancelled" if result.outcome == "cancelled" else "over"
                    return CancelResult(episode_id=episode_id, state=state, worker=result.worker, outcome=result.outcome)
    newest = episode_state.newest
    return CancelResult(episode_id=episode_id, state="closing", worker=newest.worker if newest else "")
