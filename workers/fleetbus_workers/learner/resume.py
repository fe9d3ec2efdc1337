"""Finds where a learner begins: from nothing, or at a checkpoint that counts (docs/concepts/delivery.md, rules 8, 11).

Read from the log alone; nothing is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.profile import list_profile
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.seats import list_leagues
from fleetbus.config.settings import Configuration
from fleetbus.core.training.floor import find_group_number, refuses_request
from fleetbus.core.training.lineage import complete_lineages, compute_surviving_steps, is_surviving, lineage_number
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_entries
from fleetbus.log.floor import read_floor
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    Subjects,
    TrainingFinished,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import MalformedMessage, decode_any
from fleetbus_workers.learner.checkpoint_choice import CheckpointUnread, choose_checkpoint, list_orders
from fleetbus_workers.learner.checkpoints import Checkpoint, list_checkpoints

CHECK_SECONDS = 5.0
"""How often a learner looks for a checkpoint that it cannot read."""

BookEntry = LineageStarted | StepTrained | CheckpointStored | EvaluationFinished | TrainingFinished

log = structlog.get_logger()


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's training, and what the next lineage starts from; ``evaluated``: evaluations that count, by name.

    ``restart`` is the order of a person that the lineage follows, if it follows one.
    """

    lineage: str
    parent: str
    train_last: int
    evaluated: frozenset[str]
    checkpoint: Checkpoint | None
    checkpoint_path: Path | None
    restart: str = ""
    restarts: tuple[str, ...] = ()
    """All such orders so far."""
    next_group: int = 0
    """The number of the first group that no learner has asked for."""
    counted: dict[str, float] = msgspec.field(default_factory=dict)
    """Of each lineage so far the last step that counts once this one has begun; -1 if none does."""
    unrecorded: bool = False
    """The log does not name that checkpoint yet."""
    settings_before: dict[str, dict[str, bool | int | float | str]] = msgspec.field(default_factory=dict)
    """Those of the newest lineage so far; empty if there is none, or if it published none."""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def floor(self) -> int:
        return self.checkpoint.floor if self.checkpoint else 1

    def is_voided(self, lineage: str, step: int) -> bool:
        """True for a step so far that does not count any more, so that no learner will begin there by itself."""
        return step > self.counted.get(lineage, float("inf"))


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``train.<name>``, as far as a resume_point depends on it. ``finished_step``: -1 unless that is its end;
    ``reached``: the last step of the newest lineage."""

    lineages: tuple[LineageStarted, ...]
    checkpoints: tuple[CheckpointStored, ...]
    evaluations: tuple[EvaluationFinished, ...]
    train_last: int
    finished_step: int
    reached: int = 0
    restarts: tuple[str, ...] = ()
    """Orders that lineages have followed."""

    @property
    def newest_lineage(self) -> int:
        """The highest number of a lineage; 0 if none began."""
        return max((lineage_number(started.lineage) for started in self.lineages), default=0)

    def has_followed(self, restart: str) -> bool:
        """True if a lineage has begun upon this order; there is none to follow in an empty one."""
        return not restart or restart in self.restarts


async def read_book(bus: LogBus, subjects: Subjects, policy: str) -> Book:
    """Fold ``train.<policy>``, entry by entry: months of steps would not fit into memory. Its beginning may be missing."""
    lineages: list[LineageStarted] = []
    checkpoints: list[CheckpointStored] = []
    evaluations: list[EvaluationFinished] = []
    restarts: dict[str, None] = {}
    last: BookEntry | None = None
    train_last = reached = 0
    async for stored in bus.scan([subjects.train(policy)]):
        train_last = stored.sequence
        entry = _decode_entry(stored.subject, stored.payload)
        last = entry or last
        if entry is not None and not isinstance(entry, LineageStarted):
            lineages = complete_lineages(lineages, entry.lineage)
        match entry:
            case LineageStarted():
                lineages.append(entry)
                reached = entry.parent_step
                restarts |= dict.fromkeys(filter(None, [entry.restart]))
            case StepTrained():
                reached = entry.step
            case CheckpointStored():
                checkpoints.append(entry)
                restarts |= dict.fromkeys(entry.restarts)
            case EvaluationFinished():
                evaluations.append(entry)
    return Book(
        lineages=tuple(lineages),
        checkpoints=tuple(checkpoints),
        evaluations=tuple(evaluations),
        train_last=train_last,
        finished_step=last.step if isinstance(last, TrainingFinished) and not last.more else -1,
        reached=reached,
        restarts=tuple(restarts),
    )


async def find_resume_point(
    book: Book,
    *,
    folder: Path | None = None,
    restart: str = "",
    runtime: Runtime | None = None,
    first_group: int = 0,
    log_end: int | None = None,
    published: str = "",
) -> ResumePoint:
    """Find where the next lineage begins; ``folder`` is the run's folder of checkpoints, ``restart`` what a person ordered.
    Groups below ``first_group`` are settled for good. ``log_end`` is the last entry of the log (None: wherever checkpoints
    say), and ``published`` the lineage that published last, to be given where the log knows none.

    Raises `CheckpointUnread` and `UserError` as `choose_checkpoint` does, and `UserError` when the log has lost all checkpoints
    that the folder holds. No lineage before had the name of the new one, not even one that the log has lost.
    """
    runtime = runtime or Runtime()
    lineages = book.lineages or tuple(complete_lineages([], published) if published else ())
    if restart and book.has_followed(restart):
        log.info("learner.restart_from was applied before; ignoring it, STEP/2 applies it again", restart_from=restart)
        restart = ""
    written = await runtime.offload(list_checkpoints, folder) if folder is not None else []
    unnamed = _list_unnamed(book, written, folder) if folder is not None else []
    known = [*book.checkpoints, *_find_unrecorded(book, lineages, unnamed)]
    choice = await choose_checkpoint(lineages, known, folder=folder, restart=restart, runtime=runtime, unnamed=unnamed)
    lost = [entry for entry in unnamed if _is_lost(book, entry)]
    if lost and (choice.checkpoint is None or choice.checkpoint.step < max(entry.step for entry in lost)):
        names = [Path(entry.file).name for entry in lost]
        log.error(
            "log has lost entries that these checkpoints cover; leaving the checkpoints unused",
            checkpoints=names,
            reached=book.reached,
        )
        if choice.checkpoint is None and not choice.restart:
            assert folder is not None
            raise UserError(
                f"the log names no checkpoint, but {folder} contains {', '.join(names)}: the log was lost, or is another run's;"
                f" choose where to resume: --restart-from {' | '.join(await list_orders(unnamed, folder, runtime))}"
            )
    recorded = {(entry.lineage, entry.step) for entry in book.checkpoints}
    unrecorded = choice.checkpoint is not None and (choice.checkpoint.lineage, choice.checkpoint.step) not in recorded
    if unrecorded:
        log.warning("log does not name this checkpoint; announcing it and continuing from it", path=str(choice.path))
    checkpoint = choice.checkpoint
    if checkpoint is not None and log_end is not None:
        checkpoint = checkpoint.limit_floor(log_end + 1)
    numbers = [*(lineage_number(each.lineage) for each in lineages), *(number for number, _, _ in written)]
    name = f"l{max(numbers, default=0) + 1}"
    parent = choice.parent or (checkpoint.lineage if checkpoint is not None else "")
    next_start = LineageStarted(lineage=name, worker="", parent=parent, parent_step=choice.step)
    surviving = compute_surviving_steps([*lineages, next_start])
    counted = {started.lineage: surviving.get(started.lineage, -1.0) for started in lineages}
    return ResumePoint(
        lineage=name,
        parent=parent,
        train_last=book.train_last,
        evaluated=frozenset(each.name for each in book.evaluations if each.step <= counted.get(each.lineage, -1.0)),
        checkpoint=checkpoint,
        checkpoint_path=choice.path,
        restart=choice.restart,
        restarts=tuple(dict.fromkeys([*book.restarts, *filter(None, [choice.restart])])),
        next_group=max(checkpoint.next_group if checkpoint else 0, first_group),
        counted=counted,
        unrecorded=unrecorded,
        settings_before=max(lineages, key=lambda each: lineage_number(each.lineage)).settings if lineages else {},
    )


def _list_unnamed(book: Book, written: Sequence[tuple[int, int, bool]], folder: Path) -> list[CheckpointStored]:
    """The finished checkpoints in the run's folder that the log does not name, in order; their floors are not known here."""
    named = {(entry.lineage, entry.step) for entry in book.checkpoints}
    found = [(f"l{number}", step) for number, step, is_finished in written if is_finished]
    return [
        CheckpointStored(lineage=lineage, step=step, version=-1, file=str(folder / f"{lineage}-{step:06d}"), floor=0)
        for lineage, step in found
        if (lineage, step) not in named
    ]


def _find_unrecorded(
    book: Book, lineages: Sequence[LineageStarted], unnamed: Sequence[CheckpointStored]
) -> list[CheckpointStored]:
    """Find checkpoints of the newest lineage, as their learner would have named them, where none that the log names counts.

    It was killed before it did, or the log lost those entries; training would start over without them. A log that lost all of
    its training has nothing that they could be ahead of.
    """
    surviving = compute_surviving_steps(lineages)
    if not lineages or any(is_surviving(surviving, entry.lineage, entry.step) for entry in book.checkpoints):
        return []
    reached = book.reached if book.lineages else math.inf
    newest = max(lineages, key=lambda started: lineage_number(started.lineage)).lineage
    return [entry for entry in unnamed if entry.lineage == newest and entry.step <= reached]


async def wait_for_resume_point(
    bus: LogBus, subjects: Subjects, configuration: Configuration, drain: anyio.Event, runtime: Runtime
) -> ResumePoint | None:
    """Wait for the place to begin; None if training is finished, or was drained while a checkpoint was waited for."""
    settings, folder = configuration.learner, policy_folder(configuration.run).checkpoints.absolute()
    give_up_at = anyio.current_time() + settings.checkpoint_wait
    while not drain.is_set():
        book = await read_book(bus, subjects, configuration.run.policy)
        if book.finished_step >= settings.steps and book.has_followed(settings.restart_from):
            log.info("training has already finished", step=book.finished_step)
            return None
        try:
            settled = await read_floor(bus, subjects)
            first_group = settled.groups.get(configuration.run.policy, 0)
            return await find_resume_point(
                book,
                folder=folder,
                restart=settings.restart_from,
                runtime=runtime,
                first_group=first_group,
                log_end=(await bus.log_state()).last_sequence,
                published="" if book.lineages else await _find_publisher(bus, subjects, configuration.run.policy),
            )
        except CheckpointUnread as unread:
            if anyio.current_time() >= give_up_at:
                raise
            log.error("checkpoint is unreadable; waiting for it", reason=str(unread))
        with anyio.move_on_after(CHECK_SECONDS):
            await drain.wait()
    return None


def _is_lost(book: Book, entry: CheckpointStored) -> bool:
    """True if a checkpoint holds a step that the log does not: it is written after its step was acked."""
    number = lineage_number(entry.lineage)
    return number > book.newest_lineage or (number == book.newest_lineage and entry.step > book.reached)


async def _find_publisher(bus: LogBus, subjects: Subjects, policy: str) -> str:
    """The newest lineage that began to publish; empty if none did."""
    found = ""
    async for entry in bus.scan([subjects.policy(policy)]):
        for _, started in decode_entries(LineageStarted, [entry], beside=(PolicyPublished,)):
            found = started.lineage
    return found


class MadeVersion(NamedTuple):
    """Of a published version what a learner that begins has to know."""

    lineage: str
    step: int
    window: int


async def read_published_versions(bus: LogBus, subjects: Subjects, policy: str) -> dict[int, MadeVersion]:
    """Every version in the log, ascending; final only once the learner before can publish no more."""
    made: dict[int, MadeVersion] = {}
    async for entry in bus.scan([subjects.policy(policy)]):  # one at a time: each holds the manifest of a whole model
        for _, published in decode_entries(PolicyPublished, [entry], beside=(LineageStarted,)):
            made[published.version] = MadeVersion(published.lineage, published.step, published.window)
    return dict(sorted(made.items()))


async def read_requests_from_floor(
    bus: LogBus, subjects: Subjects, policy: str, pools: Sequence[str], resume_point: ResumePoint
) -> list[tuple[int, EpisodeRequested]]:
    """The training requests of the policy's learners in the log from the checkpoint's floor on, settled ones among them, with
    their positions.

    Any client may request an episode; what no lineage requested is not one of its groups. What was settled for good may stand
    here in part, or again.
    """
    entries = [entry async for entry in bus.scan([subjects.tasks(pool) for pool in pools], start=resume_point.floor)]
    floor = await read_floor(bus, subjects)
    found = [(entry.sequence, request) for entry, request in decode_entries(EpisodeRequested, entries)]
    return [
        (sequence, request)
        for sequence, request in found
        if request.policy == policy and find_group_number(request) is not None and not refuses_request(floor, request)
    ]


def _decode_entry(subject: str, payload: bytes) -> BookEntry | None:
    try:
        entry = decode_any(STORED["train"], payload, subject=subject)
    except MalformedMessage:
        return None
    assert isinstance(entry, BookEntry)
    return entry


LINEAGE_TABLES = ("episode", "limits", "learner", "algorithm", "trainer", "evaluation")
"""Tables whose settings the log keeps with each lineage."""


def select_lineage_settings(configuration: Configuration) -> dict[str, dict[str, bool | int | float | str]]:
    """The tables that decide what a learner asks for, trains and publishes, for a replay, and the profile that the run's other
    roles are to have, and the leagues that it asks for; none of them holds a secret."""
    tables = {table: msgspec.to_builtins(getattr(configuration, table)) for table in LINEAGE_TABLES}
    leagues = {} if configuration.learner.requested_by else list_leagues(configuration.run)
    tables |= {"league": {seat: f"{league.rule}:{league.size}" for seat, league in leagues.items()}} if leagues else {}
    return tables | {"profile": {"run.profile": configuration.run.profile, **list_profile(configuration)}}
