"""``fleetbus audit RUN|FILE``: do the books of a run balance? Exit status 0: yes; 1: no, and here is where; 2: bad input;
3: what could be read of it does, and the rest was removed for good."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus.concurrency.runtime import run_in_thread
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
    from fleetbus.log.archive_retention import Removed
    from fleetbus_workers.learner.digest_audit import Scan

BALANCED, UNBALANCED, PARTLY_READ = 0, 1, 3
SHOWN_IDS = 10


@click.command("audit")
@source_argument
@archive_option("; without a server it is audited alone")
@click.option("--deep", is_flag=True, help="Prove that every trained episode is what was sampled; reads the log twice more")
@click.option(
    "--advantage",
    "trusted",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="With --deep: import and call this function, which training used as algorithm.advantage; no other code is",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the books in this file, which only you may write: the next audit with it reads only what came after",
)
@json_option("the report")
@reach_options
def command(
    source: str | None,
    archive: Path | None,
    deep: bool,
    trusted: tuple[str, ...],
    state: Path | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Check from the log alone, or from a complete recording, that every episode of a run is accounted for.

    Requested = trained + excluded by reason + evaluation + in flight; one result per episode; nothing trained twice; no action
    without an observation; the end of the log and the checkpoints beside it are those that were read. Exit status 0: the audit
    balances; 1: it does not, with the offending ids; 3: what can be read of it does, and an archive's retention removed the
    rest.
    """
    if trusted and not deep:
        raise UserError("--advantage is what --deep calls: add --deep, or leave it out")
    if state is not None and (deep or is_recording(source)):
        why = "--deep reads all of it" if deep else f"{source} is a recording"
        raise UserError(f"--state continues the audit of a log, and {why}: leave it out")
    if is_recording(source):
        name, report = run_async(_audit_file, Path(str(source)), archive, deep, trusted)
    else:
        configuration = load_settings({**values, "run__name": source}).configuration
        name, report = configuration.run.name, run_async(_audit, configuration, archive, deep, trusted, state)
    report = _tell_unproven(report, deep=deep)
    facts = {"balanced": report.balanced, "whole": report.whole, "in_flight": report.books.in_flight} | msgspec.to_builtins(
        report
    )
    print_json(facts) if as_json else _print(report, name)
    if report.findings:
        return UNBALANCED
    return BALANCED if report.whole else PARTLY_READ


async def _audit(
    configuration: Configuration, archive: Path | None, deep: bool, trusted: tuple[str, ...], state: Path | None
) -> Report:
    from fleetbus.audit.run import audit_archive, audit_run, find_removed
    from fleetbus.config.run_folder import policy_folder
    from fleetbus.config.seats import list_joined_policies
    from fleetbus.log.archive_reader import scan_archive, scan_archive_and_log
    from fleetbus_workers.learner.checkpoints import list_checkpoints

    subjects = Subjects(configuration.run.name)
    if archive is not None and not is_reachable(configuration):
        if state is not None:
            raise UserError("--state continues the audit of a log, and no server has that of the run: leave it out")
        report = _hold_against_checkpoints(await audit_archive(subjects, archive), {})
        removed = await find_removed(None, archive)
        return await _add_proof(report, partial(scan_archive, archive, run=subjects.run), trusted, removed) if deep else report
    run = configuration.run
    policies = (run.policy, *list_joined_policies(run))
    written = {  # before the log is read, which has the step of each by then
        policy: await run_in_thread(list_checkpoints, policy_folder(msgspec.structs.replace(run, policy=policy)).checkpoints)
        for policy in policies
    }
    async with open_run(configuration, "audit", own_server=True) as bus:
        report = await audit_run(bus, subjects, archive=archive, state=state)
        report = _hold_against_checkpoints(report, written)
        scan = partial(scan_archive_and_log, bus, subjects, archive)
        if not deep:
            return report
        return await _add_proof(report, scan, (*trusted, configuration.algorithm.advantage), await find_removed(bus, archive))


def _hold_against_checkpoints(report: Report, written: Mapping[str, Sequence[tuple[int, int, bool]]]) -> Report:
    """The report with the checkpoints of each policy that are ahead of the log; each was written after its step was stored."""
    from fleetbus.core.audit.findings import Findings
    from fleetbus.core.training.lineage import lineage_number

    findings = Findings()
    for policy, checkpoints in written.items():
        reached = report.reached.get(policy)
        last = (lineage_number(reached.lineage), reached.step) if reached is not None else (0, 0)
        for number, step, is_finished in checkpoints:
            if is_finished and (number, step) > last:
                findings.add("checkpoints_ahead", f"l{number}-{step:06d}", report.last_sequence)
    place = (
        () if any(written.values()) else ("that the log did not lose its end: no checkpoints of the run lie here beside it",)
    )
    return msgspec.structs.replace(
        report, findings=(*report.findings, *findings.list_found()), unproven=(*report.unproven, *place)
    )


def _tell_unproven(report: Report, *, deep: bool) -> Report:
    """The report with what no audit of this kind proves."""
    always = ("that environments and judges graded what they were shown: results and scores are their word",)
    digests = () if deep else ("that trained episodes are what was sampled: see --deep",)
    return msgspec.structs.replace(report, unproven=(*report.unproven, *digests, *always))


async def _add_proof(report: Report, scan: Scan, trusted: Collection[str], removed: Removed) -> Report:
    """The report with what the deep audit finds in the same entries."""
    from fleetbus_workers.learner.digest_audit import audit_digests

    proof = await audit_digests(scan, last_sequence=report.last_sequence, trusted=trusted, removed=removed)
    unread = (f"{proof.unread} episodes of steps whose groups were removed in part",) if proof.unread else ()
    return msgspec.structs.replace(
        report, proven=proof.proven, findings=(*report.findings, *proof.findings), unproven=(*report.unproven, *unread)
    )


async def _audit_file(file: Path, archive: Path | None, deep: bool, trusted: tuple[str, ...]) -> tuple[str, Report]:
    """The run that a recording is of, and its books."""
    from fleetbus.audit.run import audit_recording
    from fleetbus.log.archive_retention import Removed
    from fleetbus.recording.export import scan_recording

    if archive is not None:
        raise UserError(f"--archive belongs to a run and not to a recording: leave it out to audit {file}")
    reader = RecordingReader(file)
    report = _hold_against_checkpoints(await audit_recording(reader), {})
    if deep:
        removed = Removed(below=report.begins)
        report = await _add_proof(report, lambda: scan_recording(RecordingReader(file)), trusted, removed)
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
    if len(report.trained_by) > 1:
        shares = ", ".join(f"{count} by {policy}" for policy, count in report.trained_by.items())
        print(f"  of those trained {shares}: an episode counts for each policy that trains it")
    if report.proven is not None:
        print(f"  {report.proven} trained episodes proven to be what was sampled")
    if books.void:
        print(f"  {books.void} trained by an abandoned lineage, and counted elsewhere")
    if books.abandoned:
        print(f"  {books.abandoned} settled for good before their lineage was abandoned")
    if report.undelivered:
        print(f"  {report.undelivered} turns that are not trained: their agents never had the answers")
    if report.side_calls:
        print(f"  {report.side_calls} turns that are not trained: their agents asked for them beside the task")
    if report.unrewarded:
        print(f"  {report.unrewarded} turns that are not trained: their seats have no reward")
    if (sessions := report.sessions).opened:
        ended = [f"{count} {end}" for end, count in sessions.ended.items()]
        counted = ", ".join([*ended, f"{sessions.open} open"])
        print(f"  {sessions.opened} step-wise sessions with {sessions.steps} steps: {counted}")
    if (done := report.operations).counted:
        newest = f", the newest {len(done.newest)}" if done.counted > len(done.newest) else ""
        print(f"  {done.counted} operations{newest}:")
        for each in done.newest:
            print(f"    {each.line}")
    if report.refused:
        print(f"  {report.refused} late entries of what was settled for good, refused")
    if report.malformed:
        print(f"  {report.malformed} malformed entries")
    for reason in report.unproven:
        print(f"  not proven: {reason}")
    for finding in report.findings:
        ids = " ".join(finding.ids[:SHOWN_IDS]) + (" ..." if finding.count > SHOWN_IDS else "")
        print(f"NOT BALANCED {finding.kind}: {finding.count} {finding.meaning}: {ids} (entry {finding.sequence})")
    if report.balanced:
        print("the audit balances")
    elif not report.findings:
        print(
            f"nothing that was read is wrong; entries 1 to {report.begins - 1} were removed, so this proves only what follows"
        )
