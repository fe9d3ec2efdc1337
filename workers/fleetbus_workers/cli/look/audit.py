"""``fleetbus audit RUN|FILE``: do the books of a run balance? Exit status 0: yes; 1: no, and here is where; 2: bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus.recording.reader import RecordingReader
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.run_access.log_access import is_reachable, open_run
from fleetbus_workers.run_access.sources import is_recording

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.core.audit.findings import Report
    from fleetbus_workers.learner.digest_audit import Scan

BALANCED, UNBALANCED = 0, 1
SHOWN_IDS = 10


@click.command("audit")
@source_argument
@archive_option("; without a server it is audited alone")
@click.option("--deep", is_flag=True, help="Prove that every trained episode is what was sampled; reads the log twice more")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the books in this file, which only you may write: the next audit with it reads only what came after",
)
@json_option("the report")
@reach_options
def command(source: str | None, archive: Path | None, deep: bool, state: Path | None, as_json: bool, **values: Any) -> int:
    """Check from the log alone, or from a complete recording, that every episode of a run is accounted for.

    Requested = trained + excluded by reason + evaluation + in flight; one result per episode; nothing trained twice; no action
    without an observation. Exit status 0: the audit balances; 1: it does not, with the offending ids.
    """
    if state is not None and (deep or is_recording(source)):
        why = "--deep reads all of it" if deep else f"{source} is a recording"
        raise UserError(f"--state continues the audit of a log, and {why}: leave it out")
    if is_recording(source):
        name, report = run_async(_audit_file, Path(str(source)), archive, deep)
    else:
        configuration = load_settings({**values, "run__name": source}).configuration
        name, report = configuration.run.name, run_async(_audit, configuration, archive, deep, state)
    facts = {"balanced": report.balanced, "in_flight": report.books.in_flight} | msgspec.to_builtins(report)
    print_json(facts) if as_json else _print(report, name)
    return BALANCED if report.balanced else UNBALANCED


async def _audit(configuration: Configuration, archive: Path | None, deep: bool, state: Path | None) -> Report:
    from fleetbus.audit.run import audit_archive, audit_run
    from fleetbus.log.archive_reader import scan_archive, scan_archive_and_log

    subjects = Subjects(configuration.run.name)
    if archive is not None and not is_reachable(configuration):
        if state is not None:
            raise UserError("--state continues the audit of a log, and no server has that of the run: leave it out")
        report = await audit_archive(subjects, archive)
        return await _add_proof(report, partial(scan_archive, archive, run=subjects.run)) if deep else report
    async with open_run(configuration, "audit", own_server=True) as bus:
        report = await audit_run(bus, subjects, archive=archive, state=state)
        return await _add_proof(report, partial(scan_archive_and_log, bus, subjects, archive)) if deep else report


async def _add_proof(report: Report, scan: Scan) -> Report:
    """The report with what the deep audit finds in the same entries."""
    from fleetbus_workers.learner.digest_audit import audit_digests

    proof = await audit_digests(scan, last_sequence=report.last_sequence)
    return msgspec.structs.replace(report, proven=proof.proven, findings=(*report.findings, *proof.findings))


async def _audit_file(file: Path, archive: Path | None, deep: bool) -> tuple[str, Report]:
    """The run that a recording is of, and its books."""
    from fleetbus.audit.run import audit_recording
    from fleetbus.recording.export import scan_recording

    if archive is not None:
        raise UserError(f"--archive belongs to a run and not to a recording: leave it out to audit {file}")
    reader = RecordingReader(file)
    report = await audit_recording(reader)
    if reader.torn:
        click.echo(f"fleetbus: {reader.torn}", err=True)
    if deep:
        report = await _add_proof(report, lambda: scan_recording(RecordingReader(file)))
    return reader.header.run, report


def _print(report: Report, run: str) -> None:
    books, attempts = report.books, report.attempts
    rows = [("requested", books.requested), ("trained", books.trained)]
    rows += [(f"excluded: {' '.join(reason.split())}", count) for reason, count in books.excluded.items()]
    rows += [("evaluation", books.evaluation), ("waiting", books.waiting), ("running", books.running)]
    rows += [("finished, not settled", books.finished)]
    print(f"run {run}, {report.entries} entries up to {report.last_sequence}, lineages {', '.join(report.lineages) or '-'}")
    for name, count in rows:
        print(f"  {name:<32}{count:>10}")
    print(
        f"  {attempts.started} attempts: {attempts.finished} finished, {attempts.released} handed back, "
        f"{attempts.superseded} superseded, {attempts.in_flight} in flight"
    )
    print(f"  {report.observations} observations, {report.actions} actions, {report.steps} steps, {report.versions} versions")
    if report.proven is not None:
        print(f"  {report.proven} trained episodes proven to be what was sampled")
    if books.void:
        print(f"  {books.void} trained by an abandoned lineage, and counted elsewhere")
    if books.abandoned:
        print(f"  {books.abandoned} settled for good before their lineage was abandoned")
    if report.untrained:
        print(f"  {report.untrained} turns that are not trained: their agents never had the answers")
    if report.refused:
        print(f"  {report.refused} late entries of what was settled for good, refused")
    if report.malformed:
        print(f"  {report.malformed} malformed entries")
    for finding in report.findings:
        ids = " ".join(finding.ids[:SHOWN_IDS]) + (" ..." if finding.count > SHOWN_IDS else "")
        print(f"NOT BALANCED {finding.kind}: {finding.count} {finding.meaning}: {ids} (entry {finding.sequence})")
    if report.balanced:
        print("the audit balances")
