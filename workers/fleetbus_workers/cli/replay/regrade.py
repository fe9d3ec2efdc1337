"""``fleetbus regrade RUN|FILE --verifier NEW``: what another verifier says of recorded episodes. 0: done; 2: bad input."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import Source, is_recording, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.recording.episodes import Transcript
    from fleetbus_workers.replay.regraded import Regrading, Use

SHOWN = 50


@click.command("regrade")
@source_argument
@click.option(
    "--verifier",
    required=True,
    metavar="FILE.py:FUNCTION|TASKS",
    help="The new verifier: a function of a file, or a tasks file whose verifiers take the place of those of its tasks",
)
@click.option("--concurrency", type=click.IntRange(1, 256), default=16, show_default=True, help="Verifications at a time")
@click.option("--limit", type=int, default=SHOWN, show_default=True, help="Maximum number of flips in the table; 0: all")
@json_option("all flips and counts")
@archive_option()
@reach_options
def command(
    source: str | None, archive: Path | None, verifier: str, concurrency: int, limit: int, as_json: bool, **values: Any
) -> int:
    """Grade the episodes of a run or a recording again with another verifier, and list those whose reward would be another.

    The function is called with those of final_answer, conversation, task and env that it has parameters for, isolated as all
    verifiers are. There is no environment any more: a verifier that asks env has no verdict. Nothing that the recording names
    is run, and nothing is stored.
    """
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    found, torn = run_async(_regrade, source or "", configuration, archive, verifier, concurrency)
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)
    print_json(msgspec.to_builtins(found)) if as_json else _print(found, limit)
    return FINISHED


async def _regrade(
    source: str, configuration: Configuration, archive: Path | None, verifier: str, concurrency: int
) -> tuple[Regrading, str]:
    from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
    from fleetbus_workers.replay.isolation_check import check_isolation
    from fleetbus_workers.replay.new_verifier import open_verifier
    from fleetbus_workers.replay.regraded import RegradingFold
    from fleetbus_workers.replay.regrading import Regrader, find_old_reward

    code, trained = open_verifier(verifier), set[str]()
    await check_isolation(configuration)
    limits = VerifierLimits(seconds=configuration.limits.verify, max_concurrent=concurrency)
    isolated = Verifier(limits, sandbox=configuration.environment.sandbox, reuse_processes=True)
    regrader = Regrader(isolated, code, places=concurrency)
    async with open_source(source, configuration, archive) as opened, isolated.run():
        await regrader.run(_iterate_transcripts(opened, trained))
        torn = opened.torn
    fold = RegradingFold(configuration.evaluation.success_threshold)
    fold.skipped = regrader.skipped
    for result, reward, reason in regrader.verdicts:
        use: Use = "trained" if result.episode_id in trained else "held out" if result.split == "eval" else "not trained"
        fold.add(result.episode_id, result.task_key, use, find_old_reward(result), reward, reason)
    return fold.build(), torn


async def _iterate_transcripts(source: Source, trained: set[str]) -> AsyncIterator[Transcript]:
    """Transcripts as episodes finish; ``trained`` gets the episodes that steps consumed."""
    from fleetbus.log.stored_entries import read_stored
    from fleetbus.recording.rows import TranscriptFold, list_transcript_subjects
    from fleetbus_schemas import StepTrained

    fold = TranscriptFold()
    async for entry in source.entries([*list_transcript_subjects(source.subjects), source.subjects.train("*")]):
        if entry.subject.split(".", 3)[2] == "train":
            if isinstance(step := read_stored(entry), StepTrained):
                trained.update(step.episodes)
        elif (transcript := fold.add(entry)) is not None:
            yield transcript


def _print(found: Regrading, limit: int) -> None:
    table = build_table("episode,task,use", right="old,new,")
    shown = found.flips[:limit] if limit > 0 else found.flips
    for flip in shown:
        old = "none" if flip.old is None else f"{flip.old:g}"
        table.add_row(flip.episode_id, flip.task_key, flip.use, old, f"{flip.new:g}", "crosses success" if flip.crosses else "")
    if shown:
        print_table(table)
    hidden = f", {len(shown)} shown (--limit 0: all)" if len(shown) < len(found.flips) else ""
    uses = ", ".join(f"{count} {use}" for use, count in sorted(found.flips_by_use.items()))
    print(
        f"{found.episodes:,} episodes graded again: {found.same:,} as before, {len(found.flips):,} otherwise"
        f"{f' ({uses})' if uses else ''}{hidden}, {found.without_verdict:,} without a verdict, {found.skipped:,} skipped"
    )
    if found.mean_old is not None and found.mean_new is not None:
        print(f"mean reward {found.mean_old:.3f} -> {found.mean_new:.3f}")
    for reason, count in found.reasons.items():
        print(f"no verdict, {count:,} times: {reason}")
