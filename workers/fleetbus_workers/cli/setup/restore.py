"""``fleetbus restore BACKUP --run NAME``: a run's log on a server that has none of it, from an archive or a recording."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.auth.access import build_access
from fleetbus.concurrency.runtime import run_in_thread
from fleetbus.errors import UserError
from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url
from fleetbus_workers.run_access.sources import is_recording

if TYPE_CHECKING:
    from fleetbus.bus.base import StreamEntry
    from fleetbus.config.settings import Configuration
    from fleetbus.log.restore import Restored

    Scan = Callable[[], AsyncGenerator[StreamEntry]]


@click.command("restore", cls=SettingsCommand)
@click.argument("backup", nargs=-1, required=True, metavar="DIR|URL|FILE...")
@click.option("--only-needed", is_flag=True, help="Begin at the first entry that the run still needs; reads the backup twice")
@json_option("what was restored")
@settings_options("run", "nats")
def command(backup: tuple[str, ...], only_needed: bool, as_json: bool, **values: Any) -> int:
    """Store a run's log anew on a server that has none of it, under its own or another name (--run).

    BACKUP is the recorder's archive, its folder or recorder.store or both, or a recording with all entries and secrets
    (`fleetbus record --keep-secrets`). Stop all workers of the run first. Checkpoints and weights are files: copy them to the
    run's folder. A restore that was interrupted is continued by repeating it. Exit status 1: stored, and the recording is torn:
    what the log had behind it is lost.
    """
    configuration = load_settings(values).configuration
    facts, torn = run_async(
        _restore_recording if is_recording(backup[0]) else _restore_archive, configuration, backup, only_needed
    )
    if as_json:
        print_json(msgspec.to_builtins(facts))
    else:
        name = "" if facts.source == facts.run else f" of run {facts.source}"
        print(f"run {facts.run} has entries {facts.begins} to {facts.last}{name}, {facts.stored} of them stored now")
        print("give its recorder another --archive: entries have the time at which they were restored")
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)
    return CRASHED if torn else FINISHED


async def _restore_recording(configuration: Configuration, backup: tuple[str, ...], only_needed: bool) -> tuple[Restored, str]:
    """The log's facts, and a line about what the recording lacks at its end, empty if it is whole."""
    from fleetbus.recording.export import scan_recording
    from fleetbus.recording.reader import RecordingReader

    if len(backup) > 1:
        raise UserError("a recording is restored alone: give one FILE, or the folder and the store of an archive")
    file = Path(backup[0])
    reader = RecordingReader(file)
    header = reader.header
    if header.redacted or header.selected:
        why = "secrets were taken out of it" if header.redacted else "it has some of the episodes alone"
        raise UserError(f"{file} is no backup, because {why}: restore the recorder's archive")
    facts = await _restore(configuration, partial(scan_recording, reader), header.begins, only_needed)
    return facts, reader.torn


async def _restore_archive(configuration: Configuration, backup: tuple[str, ...], only_needed: bool) -> tuple[Restored, str]:
    from fleetbus.log.archive_reader import scan_archive
    from fleetbus.log.archive_retention import read_removed
    from fleetbus_workers.recorder.archive_places import open_archive_places

    with open_archive_places(backup) as folder:
        removed = await run_in_thread(read_removed, folder)
        return await _restore(configuration, partial(scan_archive, folder), removed.below, only_needed), ""


async def _restore(configuration: Configuration, scan: Scan, begins: int, only_needed: bool) -> Restored:
    from fleetbus.bus.nats import connect
    from fleetbus.log.restore import restore_log
    from fleetbus_workers.recorder.needed_entries import find_first_needed
    from fleetbus_workers.up.process_plans import build_stream_plan

    if only_needed:
        begins = max(begins, await find_first_needed(scan()))
    url, run = resolve_server_url(configuration), configuration.run.name
    access = build_access("restore", configuration.nats.auth, run)
    async with connect(url, run=run, role="init", worker=generate_worker_name("restore"), **access) as bus:
        return await restore_log(bus, build_stream_plan(configuration), scan(), begins=begins, only_needed=only_needed)
