"""``fleetbus record RUN -o FILE``: a run's log as one file, all of it or followed live, without the secrets in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click
import msgspec

from fleetbus.bus.objects import ObjectMissing, get_content
from fleetbus.config.load import dump_configuration
from fleetbus.config.run_folder import RunFolder, policy_folder_below, run_folder
from fleetbus.errors import BusError, UserError, iterate_leaves
from fleetbus.logs.secret_formats import redact_command
from fleetbus.package_version import read_fleetbus_version
from fleetbus.recording.format import RecordingHeader, compute_message_schema
from fleetbus.recording.reader import read_header
from fleetbus.recording.writer import create_recording
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import call_on_signal, run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.run_access.sources import is_recording, open_source
from fleetbus_workers.weights.store import get_every_object

if TYPE_CHECKING:
    from fleetbus.bus.base import LogState, StreamEntry
    from fleetbus.config.settings import Configuration
    from fleetbus.recording.export import Export, PublishedWeights
    from fleetbus.recording.format import RecordingHeader
    from fleetbus.recording.writer import RecordingWriter
    from fleetbus_workers.run_access.sources import Source

FOLLOWER_NICE = 10
"""Added to the niceness of a process that follows a run."""

WEIGHTS_NAME = re.compile(r"l\d{1,9}-v\d{6,12}\.(safetensors|delta)", re.ASCII)
"""What a learner calls its files."""

OBJECT_SECONDS = 30.0
"""Longest wait for one object of the bucket; what does not arrive is reported as missing."""


@click.command("record")
@source_argument
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write (.fbrec)")
@click.option("--follow", is_flag=True, help="Keep recording new entries until Ctrl-C or SIGTERM")
@click.option("--episode", "episodes", multiple=True, metavar="ID", help="Only this episode; may be given several times")
@click.option("--weights", is_flag=True, help="Include the published weights files that still exist")
@click.option("--objects/--no-objects", default=True, show_default=True, help="Include the images that messages refer to")
@click.option(
    "--max-objects",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    metavar="MIB",
    help="Maximum size of all objects in MiB; earlier ones take precedence",
)
@click.option("--keep-secrets", is_flag=True, help="Do not redact secrets")
@click.option("--force", is_flag=True, help="Replace an existing output file")
@archive_option("; without a server it is recorded alone")
@json_option("what was written")
@reach_options
def command(
    source: str | None, output: Path, follow: bool, archive: Path | None, force: bool, as_json: bool, **values: Any
) -> int:
    """Export the log of a run, or part of a recording, as one self-describing file.

    API keys, passwords and other secrets are replaced by [redacted]; objects that contain one as text are left out, but the
    content of images is not checked. `fleetbus episodes FILE` shows the content, `fleetbus replay FILE` plays it against a
    worker. Exit status 0: written; 1: written, and it is not the whole log; 2: bad input, nothing was written.
    """
    choices = {name: values.pop(name) for name in ("episodes", "weights", "keep_secrets", "objects", "max_objects")}
    if follow and is_recording(source):
        raise UserError("--follow needs a reachable run, not a file")
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    if follow:
        _lower_priority()  # before there are threads: those keep what they were made with
    work = partial(_record, source, configuration, output, archive=archive, follow=follow, overwrite=force, **choices)
    facts = run_async(work)
    _print(facts, output, as_json)
    for problem in facts["problems"]:
        click.echo(f"fleetbus: {problem}", err=True)
    return CRASHED if facts["problems"] else FINISHED


def _lower_priority() -> None:
    """Lower the priority of this process, so that the run's workers are hardly slowed; the log keeps unread entries.

    Not idle scheduling: on a machine whose cores are all busy it leaves a signal unanswered for minutes.
    """
    if hasattr(os, "nice"):
        os.nice(FOLLOWER_NICE)


async def _record(
    source: str | None,
    configuration: Configuration,
    output: Path,
    *,
    archive: Path | None,
    follow: bool,
    overwrite: bool,
    episodes: tuple[str, ...],
    weights: bool,
    keep_secrets: bool,
    objects: bool,
    max_objects: int,
) -> dict[str, Any]:
    from fleetbus.audit.run import find_removed
    from fleetbus.recording.export import Export
    from fleetbus.recording.objects import add_objects
    from fleetbus.recording.redaction import Redactor, find_environment_secrets

    redactor = None if keep_secrets else Redactor(find_environment_secrets(os.environ))
    async with open_source(source, configuration, archive) as entries_of:
        if follow and entries_of.bus is None:
            raise UserError("--follow needs a server: give --nats, or start `fleetbus up` first")
        if entries_of.file is not None and _is_same_file(entries_of.file, output):
            raise UserError(f"{output} is the recording being read: give another --output")
        begins = (await find_removed(entries_of.bus, archive)).below
        header = _build_header(entries_of, configuration, episodes, redactor is not None, begins)
        with create_recording(output, header, overwrite=overwrite) as writer:
            export = Export(writer, redactor=redactor, selected=frozenset(episodes) if episodes else None)
            last = _SequenceTracker()
            log_state = await entries_of.bus.log_state() if entries_of.bus is not None else None
            await export.copy(last.track(entries_of.entries()), progress=_build_progress_callback(writer))
            problems = _find_problems(log_state, last.sequence)
            if entries_of.torn:
                problems.append(entries_of.torn)
                writer.is_torn = True
            if header.begins > 1:
                problems.append(f"entries 1 to {header.begins - 1} were removed by the archive's retention")
            if follow:
                writer.flush()
                writer.take_place()
                problems += await _follow(export, entries_of, writer, last.sequence + 1)
            folder = run_folder(configuration.run)
            recorded = entries_of.files if entries_of.file is not None else None
            files = await anyio.to_thread.run_sync(_add_weights, writer, export.published, folder, recorded) if weights else 0
            names = export.references.names if objects else {}
            fetch = _build_object_fetch(entries_of)
            added = await add_objects(writer, names, fetch, limit_bytes=max_objects << 20, redactor=redactor)
            writer.flush()
    return {
        "file": str(output),
        "run": entries_of.subjects.run,
        "entries": writer.entries,
        "bytes": writer.size_bytes,
        "last_sequence": writer.last_sequence,
        "redacted": redactor is not None,
        "redacted_entries": redactor.redacted if redactor else 0,
        "weights_files": files,
        "weights_missing": len(set(export.published)) - files if weights else 0,
        "objects": {**msgspec.structs.asdict(added), "named": len(export.references.names)},
        "torn_source": entries_of.torn,
        "problems": problems,
    }


def _find_problems(log_state: LogState | None, last_sequence: int) -> list[str]:
    """List what keeps the recording from being the whole log."""
    found = []
    if not last_sequence:
        found.append("nothing was read: the log is empty")
    if log_state is not None and last_sequence < log_state.last_sequence:
        found.append(f"the log goes to entry {log_state.last_sequence} and was read to {last_sequence}: it lost its end")
    if log_state is not None:
        found += [
            f"the stream's limit {limit} removes entries that nobody has settled: remove it" for limit in log_state.erasing
        ]
    return found


def _build_object_fetch(source: Source) -> Callable[[str], Awaitable[bytes | None]]:
    """A function that reads objects where the entries came from; None for those that are not there, or do not come in time."""
    store = get_every_object(source.bus, source.subjects.run) if source.bus is not None else None

    async def fetch(name: str) -> bytes | None:
        if store is None:
            return source.objects.get(name)
        try:
            with anyio.fail_after(OBJECT_SECONDS):
                return await get_content(store, name)
        except (ObjectMissing, BusError, OSError):  # OSError has TimeoutError below it
            return None

    return fetch


def _is_same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


class _SequenceTracker:
    """Notes the last sequence while entries pass by."""

    sequence = 0

    async def track(self, entries: AsyncIterator[StreamEntry]) -> AsyncIterator[StreamEntry]:
        async for entry in entries:
            self.sequence = entry.sequence
            yield entry


def _build_header(
    source: Source, configuration: Configuration, episodes: tuple[str, ...], redacted: bool, begins: int
) -> RecordingHeader:
    import time

    if source.file is not None:
        earlier = read_header(source.file)
        return msgspec.structs.replace(earlier, selected=episodes or earlier.selected, redacted=redacted or earlier.redacted)
    known = run_folder(configuration.run).configuration.is_file()
    return RecordingHeader(
        run=source.subjects.run,
        fleetbus=read_fleetbus_version(),
        messages=compute_message_schema(),
        created_ns=time.time_ns(),
        configuration=_strip_local_settings(msgspec.json.decode(dump_configuration(configuration))) if known else {},
        selected=episodes,
        redacted=redacted,
        begins=begins,
    )


def _strip_local_settings(tables: dict[str, Any]) -> dict[str, object]:
    """Drop addresses and paths that are meaningful on this machine only, and secrets in what remains: environments are named by
    addresses and command lines."""
    from fleetbus.recording.redaction import Redactor, find_environment_secrets

    tables["nats"]["url"] = ""
    tables["run"]["folder"] = ""
    tables["run"]["environment"] = redact_command(tables["run"]["environment"])
    cleaned: dict[str, object] = Redactor(find_environment_secrets(os.environ)).clean_value("", tables)
    return cleaned


async def _follow(export: Export, source: Source, writer: RecordingWriter, start: int) -> list[str]:
    """Follow the log until a signal comes, or until it is gone: then with a line that says so."""
    assert source.bus is not None
    stop, problems = anyio.Event(), list[str]()
    try:
        async with anyio.create_task_group() as group:
            await group.start(call_on_signal, stop.set)
            click.echo("recording new entries; Ctrl-C stops", err=True)
            await export.follow(source.bus, source.subjects, stop, start=start, progress=_build_progress_callback(writer))
            group.cancel_scope.cancel()
    except* BusError as errors:
        problems.append(f"the log could not be followed behind entry {writer.last_sequence}: {next(iterate_leaves(errors))}")
    return problems


def _build_progress_callback(writer: RecordingWriter) -> Callable[[int], None]:
    """On a terminal one line that counts; elsewhere nothing."""
    if not sys.stderr.isatty():
        return lambda seen: None

    def show(seen: int) -> None:
        click.echo(f"\r{seen:,} entries, {writer.size_bytes / 1e6:.1f} MB", nl=False, err=True)

    return show


def _add_weights(
    writer: RecordingWriter, weights: list[PublishedWeights], folder: RunFolder, recorded: dict[str, bytes] | None
) -> int:
    """Files of these versions; returns how many were found. Of a recording that is read, those in it: the files that it names
    are another machine's, or any of this user's. Of a log, those that are called as weights are, never through a link."""
    from urllib.parse import unquote, urlsplit

    added = 0
    for each in dict.fromkeys(weights):
        published = Path(unquote(urlsplit(each.uri).path))
        name = each.name_file(published.name)
        if recorded is not None:
            if name in recorded:
                writer.add_content(name, recorded[name])
                added += 1
            continue
        kept = policy_folder_below(folder, each.policy) if each.policy else folder
        places = (published, kept.weights / published.name) if WEIGHTS_NAME.fullmatch(published.name) else ()
        found = next((path for path in places if path.is_file() and not path.is_symlink()), None)
        if found is not None:
            writer.add_file(name, found)
            added += 1
    return added


def _print(facts: dict[str, Any], output: Path, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    redacted = f", {facts['redacted_entries']} redacted" if facts["redacted_entries"] else ""
    files = f", {facts['weights_files']} weights files" if facts["weights_files"] else ""
    if facts["weights_missing"]:
        click.echo(f"fleetbus: {facts['weights_missing']} weights files are not on this machine and were left out", err=True)
    _report_objects(facts["objects"], redacted=facts["redacted"])
    said = f"{facts['entries']:,} entries of run {facts['run']}{redacted}{files}{_format_objects(facts['objects'])}"
    print(f"{said}: {output} ({facts['bytes'] / 1e6:.2f} MB)")


def _format_objects(found: dict[str, int]) -> str:
    return f", {found['objects']} objects of {found['bytes'] / 1e6:.1f} MB" if found["objects"] else ""


def _report_objects(found: dict[str, int], *, redacted: bool) -> None:
    reasons = {"missing": "are in no bucket any more", "withheld": "have a secret in them", "beyond": "exceed --max-objects"}
    for name, reason in reasons.items():
        if found[name]:
            click.echo(f"fleetbus: {found[name]} objects {reason} and were left out", err=True)
    if redacted and found["objects"]:
        click.echo("fleetbus: images in it were not checked for secrets; use --no-objects to leave them out", err=True)
