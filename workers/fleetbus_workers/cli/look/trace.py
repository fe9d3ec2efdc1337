"""``fleetbus trace RUN|FILE``: every episode and every step-wise session as an OpenTelemetry trace, derived from the log; to a
receiver or to a file."""

from __future__ import annotations

import sys
from contextlib import ExitStack, aclosing, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.cli.output import json_option
from fleetbus_workers.command.event_loop import call_on_signal, run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.observe.tracing.otlp_file import FileSink
from fleetbus_workers.observe.tracing.span import SpansRefused
from fleetbus_workers.run_access.sources import is_recording, open_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetbus.config.settings import Configuration
    from fleetbus_workers.observe.tracing.run import TraceSummary, Tracing
    from fleetbus_workers.observe.tracing.span import SpanSink
    from fleetbus_workers.run_access.sources import Source


@click.command("trace")
@source_argument
@click.option(
    "--otlp", metavar="URL", default="", help="OTLP/HTTP receiver, e.g. http://127.0.0.1:4318 (Collector, Jaeger, Tempo)"
)
@click.option(
    "--jsonl", type=click.Path(path_type=Path, dir_okay=False), help="Append OTLP JSON lines, which the Collector reads"
)
@click.option("--follow", is_flag=True, help="Export new traces until Ctrl-C")
@click.option("--episode", "episodes", multiple=True, metavar="ID", help="Only this episode; may be repeated")
@click.option(
    "--session",
    "sessions",
    multiple=True,
    metavar="NAME",
    help="Only this step-wise session; may be repeated and combined with --episode",
)
@click.option(
    "--sample", type=click.FloatRange(0, 1), default=1.0, metavar="SHARE", help="Share of the traces, by their id [1]"
)
@click.option(
    "--after",
    type=click.IntRange(0),
    default=0,
    metavar="SEQUENCE",
    help="Continue after the last_sequence of an earlier export",
)
@click.option("--content", is_flag=True, help="With the messages, arguments and results; secrets are removed")
@json_option("what was written")
@archive_option()
@reach_options
def command(source: str | None, as_json: bool, **values: Any) -> int:
    """Export a trace per episode: queue, turns, generation, tools, verification, training, with their positions in the log.

    Step-wise sessions (gateways, clients) have one each: opening, resets, steps, verification, take-overs.
    Traces are built from the log alone: live, afterwards, or from a recording. Ids of traces and spans are derived from the run
    and the episode or session, so exporting again adds no duplicates. Headers with keys come from OTEL_EXPORTER_OTLP_HEADERS.
    --otlp needs `pip install 'fleetbus[otel]'`. Exit status 2: bad input, or a receiver that accepts nothing.
    """
    names = ("otlp", "jsonl", "follow", "episodes", "sessions", "sample", "after", "archive", "content")
    chosen = {name: values.pop(name) for name in names}
    _check_options(source, chosen)
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    work = partial(_trace, source, configuration, **chosen)
    written = run_async(work)
    _print(written, as_json)
    return FINISHED


def _check_options(source: str | None, chosen: dict[str, object]) -> None:
    if not chosen["otlp"] and chosen["jsonl"] is None:
        raise UserError("no output: give --otlp URL or --jsonl FILE")
    if chosen["follow"] and (is_recording(source) or chosen["archive"] or chosen["episodes"] or chosen["sessions"]):
        raise UserError(
            "--follow works only with a run and all of its episodes: leave out the recording, --archive, --episode or --session"
        )


async def _trace(
    source: str | None,
    configuration: Configuration,
    *,
    otlp: str,
    jsonl: Path | None,
    follow: bool,
    episodes: Sequence[str],
    sessions: Sequence[str],
    sample: float,
    after: int,
    archive: Path | None,
    content: bool,
) -> TraceSummary:
    from fleetbus_workers.observe.tracing.fold import LogTraces
    from fleetbus_workers.observe.tracing.run import Tracing

    with ExitStack() as stack:
        async with open_source(source, configuration, archive) as opened:
            run = opened.subjects.run
            sinks = [stack.enter_context(closing(sink)) for sink in _open_sinks(run, otlp, jsonl)]
            traces = LogTraces(run, episodes=episodes, sessions=sessions, ratio=sample, content=content)
            tracing = Tracing(run, traces, sinks, after=after)
            try:
                if follow:
                    await _follow(opened, tracing)
                else:
                    async with aclosing(opened.entries(_list_subjects(opened, episodes, sessions))) as entries:
                        await tracing.copy(entries)
            except* SpansRefused as refused:
                raise UserError(str(refused.exceptions[0])) from None
            if opened.torn:
                print(f"fleetbus: {opened.torn}", file=sys.stderr)
    return tracing.written


def _open_sinks(run: str, otlp: str, jsonl: Path | None) -> list[SpanSink]:
    sinks: list[SpanSink] = []
    if otlp:
        try:
            from fleetbus_workers.observe.tracing.otlp import OtlpSink
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is not installed: pip install 'fleetbus[otel]'") from error
        sinks.append(OtlpSink(otlp, run=run))
    if jsonl is not None:
        sinks.append(FileSink(jsonl, run=run))
    return sinks


def _list_subjects(source: Source, episodes: Sequence[str], sessions: Sequence[str]) -> list[str]:
    from fleetbus.recording.episodes import build_episode_subjects

    subjects = source.subjects
    wanted = [each for name in episodes for each in build_episode_subjects(subjects, validate_name("episode", name))]
    journals = [subjects.session(validate_name("session", name)) for name in sessions]
    if wanted or journals:
        return [*wanted, *journals, *([subjects.train("*")] if wanted else [])]
    played = [subjects.tasks(), subjects.observations(), subjects.actions(), subjects.episodes]
    return [*played, subjects.session("*"), subjects.train("*")]


async def _follow(source: Source, tracing: Tracing) -> None:
    stop = anyio.Event()
    assert source.bus is not None
    async with anyio.create_task_group() as tasks:
        await tasks.start(call_on_signal, stop.set)
        await tracing.follow(source.bus, source.subjects, stop)
        tasks.cancel_scope.cancel()


def _print(written: TraceSummary, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(written).decode())
        return
    open_ones = f", {written.open} still open" if written.open else ""
    print(
        f"run {written.run}: {written.episodes} episodes{open_ones}{_format_sessions(written)}, {written.spans} spans, "
        f"the log up to {written.last_sequence} (--after {written.last_sequence} continues from here)"
    )


def _format_sessions(written: TraceSummary) -> str:
    still = f", {written.open_sessions} still open" if written.open_sessions else ""
    return f", {written.sessions} sessions{still}" if written.sessions or written.open_sessions else ""
