"""Progress display of a run: plain lines, and a live table below them on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

import anyio

from fleetbus_schemas import EpisodeFinished, EvaluationFinished, Heartbeat, Message, StepTrained, WorkerFailed, WorkerStarted
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.observe.run.formatting import (
    format_count,
    format_duration,
    format_evaluation,
    format_evaluation_progress,
    format_failures,
    format_stage_times,
    format_step,
    format_step_short,
    in_flight,
)
from fleetbus_workers.observe.run.progress import Progress

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

REFRESH_SECONDS = 0.25
BAR_WIDTH = 40
EVALUATION_SECONDS = 10.0
"""Between two lines about how far an evaluation is."""


class Display(Protocol):
    """Shows the events of a run."""

    def line(self, text: str) -> None:
        """Show one message."""

    def show_message(self, message: Message) -> None:
        """An entry of the log, after it was folded into the progress."""


class PlainDisplay:
    """One line per event, without colours or movement: for files, pipes and other programs. ``step`` formats a training
    step."""

    def __init__(
        self, progress: Progress, write: Callable[[str], None] | None = None, step: Callable[[Progress], str] = format_step
    ) -> None:
        self._progress = progress
        self._write = write or _write_line
        self._step = step
        self._said = ""
        self._evaluation_said_at = -math.inf

    def line(self, text: str) -> None:
        self._write(text)

    def show_message(self, message: Message) -> None:
        match message:
            case StepTrained():
                self._write(self._step(self._progress))
                self._report_learning_signal()
            case EvaluationFinished():
                self._write(format_evaluation(message))
            case EpisodeFinished() if message.split == "eval":
                self._report_evaluation()
            case WorkerStarted():
                self._write(f"{message.worker} is ready")
            case WorkerFailed():
                self._write(f"{message.worker} failed: {message.error_class}: {message.error}")

    def _report_evaluation(self) -> None:
        """Every so often how far a held-out evaluation is, and how long it still takes."""
        now = time.monotonic()
        if now - self._evaluation_said_at >= EVALUATION_SECONDS and (line := format_evaluation_progress(self._progress)):
            if self._evaluation_said_at > -math.inf:
                self._write(line)
            self._evaluation_said_at = now

    def _report_learning_signal(self) -> None:
        """Report once when the learning signal disappears."""
        found = self._progress.signal.latest
        kind = found.kind if found is not None else ""
        if found is not None and kind != self._said:
            self._write(found.line)
        self._said = kind


def _write_line(text: str) -> None:
    print(text, flush=True, file=sys.stdout)  # noqa: T201


@asynccontextmanager
async def open_display(progress: Progress, stream: TextIO | None = None) -> AsyncIterator[Display]:
    """A display for standard output: live on a terminal, plain lines elsewhere."""
    target = stream or sys.stdout
    if not target.isatty():
        yield PlainDisplay(progress)
        return
    async with _open_live_display(progress, target) as display:
        yield display


@asynccontextmanager
async def _open_live_display(progress: Progress, target: TextIO) -> AsyncIterator[Display]:
    from rich.live import Live

    began = anyio.current_time()

    def render() -> Group:
        now = anyio.current_time()
        return render_live_view(progress, progress.worker_registry.list_live(now), now - began)

    console = open_console(target)
    with Live(render(), console=console, auto_refresh=False, transient=True) as live:

        async def refresh() -> None:
            while True:
                live.update(render(), refresh=True)
                await anyio.sleep(REFRESH_SECONDS)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refresh)
            yield PlainDisplay(progress, lambda text: console.print(text, highlight=False), format_step_short)
            tasks.cancel_scope.cancel()


def render_live_view(progress: Progress, workers: list[Heartbeat], seconds: float) -> Group:
    """The live part of the screen: a bar, the newest numbers, a row per worker."""
    from rich.console import Group
    from rich.text import Text

    episodes, tokens = progress.rates()
    numbers = [
        f"step {progress.step}/{progress.steps}",
        f"version {progress.version}",
        f"{progress.episodes:,} episodes",
        f"{episodes:.0f} episodes/s",
        f"{format_count(tokens)} tokens/s",
    ]
    done = round(BAR_WIDTH * min(max(progress.step, 0) / progress.steps, 1.0))
    bar = Text.assemble(("━" * done, "green"), ("━" * (BAR_WIDTH - done), "dim"), f" {format_duration(seconds)}")
    lines = [bar, Text(" · ".join(numbers), style="bold")]
    lines += [Text(f"{name}: {format_step_short(other)}") for name, other in progress.others.items()]
    lines += [Text(text, style="dim") for text in _list_details(progress) if text]
    return Group(*lines, _build_worker_table(workers))


def _list_details(progress: Progress) -> tuple[str, ...]:
    return format_evaluation_progress(progress), format_stage_times(progress.metrics), format_failures(progress)


def _build_worker_table(workers: list[Heartbeat]) -> Table:
    from rich.table import Table

    table = Table("worker", "state", "in flight", "version", box=None, header_style="dim", pad_edge=False)
    for beat in workers:
        version = str(beat.policy_version) if beat.policy_version >= 0 else ""
        state = "draining" if beat.draining else "in trouble" if beat.problem else "working"
        table.add_row(beat.worker, state, in_flight(beat.role, beat.in_flight, beat.slots), version)
    return table
