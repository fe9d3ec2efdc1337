"""``fleetbus episodes --format atif|eval``: whole episodes written in the formats of other tools.

What stands in a run's log is cleaned of secrets on the way, as `fleetbus record` does it; a recording is written as it is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleetbus.errors import UserError
from fleetbus.files import create_folder, replace_file
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import Source, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.recording.episodes import Transcript


def check_output(file_format: str, output: Path | None) -> Path:
    """The file or folder that this format is written to; raises `UserError` if ``--output`` names none."""
    if output is None:
        raise UserError(f"--format {file_format} needs --output, the file or folder to write")
    if file_format == "eval" and output.suffix != ".eval":
        raise UserError(f"cannot write {output}: the name of a log of Inspect ends in .eval")
    if file_format == "atif" and output.suffix not in ("", ".json", ".jsonl") and not output.is_dir():
        raise UserError(f"cannot write {output}: give FILE.jsonl, or a folder for a file per episode")
    if output.is_dir() and (file_format == "eval" or output.suffix in (".json", ".jsonl")):
        raise UserError(f"cannot write {output}: it is a folder")
    return output


def write_episodes(
    source: str, configuration: Configuration, archive: Path | None, chosen: Collection[str], file_format: str, output: Path
) -> int:
    """Write the ``chosen`` episodes, in the order in which they finished; those that cannot be written are counted."""
    if not chosen:
        raise UserError("no episode matches: nothing was written")
    if output.suffix == ".json" and len(chosen) != 1:
        raise UserError(f"{output} holds one episode, and {len(chosen)} match: give FILE.jsonl, or a folder")
    write = _write_eval if file_format == "eval" else _write_atif
    try:
        written, left_out, torn = run_async(write, source, configuration, archive, chosen, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
    for line in (torn, *(f"left out: {count} episodes: {reason}" for reason, count in left_out.items())):
        if line:
            click.echo(f"fleetbus: {line}", err=True)
    print(f"{written:,} of {len(chosen):,} episodes written to {output}")
    return FINISHED


async def _write_atif(
    source: str, configuration: Configuration, archive: Path | None, chosen: Collection[str], output: Path
) -> tuple[int, Counter[str], str]:
    from fleetbus.interchange.assembly import make_name
    from fleetbus.interchange.atif_export import Unwritable, build_trajectory, encode_trajectory
    from fleetbus.package_version import read_fleetbus_version

    version, written, left_out = read_fleetbus_version(), 0, Counter[str]()
    part = output.with_name(f"{output.name}.{os.getpid()}.part") if output.suffix else None
    if part is None:
        create_folder(output)
    file = part.open("wb") if part is not None else None
    try:
        async with open_source(source, configuration, archive) as opened:
            async with aclosing(_iterate_chosen(opened, chosen)) as transcripts:
                async for transcript in transcripts:
                    try:
                        trajectory = build_trajectory(transcript, run=opened.subjects.run, version=version)
                    except Unwritable as error:
                        left_out[str(error)] += 1
                        continue
                    line = encode_trajectory(trajectory) + b"\n"
                    if file is not None:
                        file.write(line)
                    else:
                        replace_file(output / f"{make_name(trajectory.trajectory_id or '')}.json", line)
                    written += 1
            torn = opened.torn
        if file is not None and part is not None:
            file.close()
            part.replace(output)
    finally:
        if file is not None and part is not None:
            with suppress(OSError):  # on a full disk that writes once more
                file.close()
            part.unlink(missing_ok=True)
    return written, left_out, torn


async def _write_eval(
    source: str, configuration: Configuration, archive: Path | None, chosen: Collection[str], output: Path
) -> tuple[int, Counter[str], str]:
    from fleetbus.interchange.eval_export import EvalWriter
    from fleetbus.package_version import read_fleetbus_version

    async with open_source(source, configuration, archive) as opened:
        with EvalWriter(output, run=opened.subjects.run, version=read_fleetbus_version()) as writer:
            async with aclosing(_iterate_chosen(opened, chosen)) as transcripts:
                async for transcript in transcripts:
                    writer.add(transcript)
        return writer.written, Counter(), opened.torn


async def _iterate_chosen(source: Source, chosen: Collection[str]) -> AsyncGenerator[Transcript]:
    """The transcripts of these episodes as they finished, then those without a result."""
    from fleetbus.recording.episodes import build_episode_subjects
    from fleetbus.recording.redaction import Redactor, find_environment_secrets
    from fleetbus.recording.rows import TranscriptFold, list_transcript_subjects

    redactor = Redactor(find_environment_secrets(os.environ)) if source.file is None else None
    fold, subjects = TranscriptFold(), source.subjects
    (only,) = chosen if len(chosen) == 1 else ("",)
    patterns = build_episode_subjects(subjects, only) if only else list_transcript_subjects(subjects)
    async for entry in source.entries(patterns):
        if entry.subject.rpartition(".")[2] not in chosen:
            continue
        transcript = fold.add(redactor.clean(entry) if redactor is not None else entry)
        if transcript is not None:
            yield transcript
    for transcript in fold.unfinished():
        yield transcript
