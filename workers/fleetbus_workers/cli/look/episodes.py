"""``fleetbus episodes RUN|FILE [EPISODE]``: episodes listed and filtered, or one of them read turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus.files import replace_file
from fleetbus_schemas import Outcome
from fleetbus_workers.api.tables import build_rows, check_format, list_columns, write_rows
from fleetbus_workers.cli.look.episode_files import check_output, write_episodes
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_and_episode_arguments
from fleetbus_workers.cli.look.text_search import print_found, search_text
from fleetbus_workers.cli.look.transcript import build_facts, print_transcript
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import is_recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetbus.core.episode.failure_kinds import FailureKind
    from fleetbus.recording.episodes import EpisodeRow, Transcript
    from fleetbus.recording.text_index import Found

FILTERS = ("outcome", "error", "split", "task", "group", "min_reward", "max_reward", "tool_errors", "label")
"""The options that choose rows; `fleetbus bundle` has the same."""

SHOWN = 50
SHOWN_FAILURES = 5


@click.command("episodes")
@source_and_episode_arguments
@click.option("--outcome", metavar="NAME", help="Only this outcome; `open` for those without one")
@click.option("--error", metavar="TEXT", help="Only episodes whose error class contains this")
@click.option("--split", type=click.Choice(["train", "eval"]), help="Only this split")
@click.option("--task", metavar="TEXT", help="Only task keys that contain this")
@click.option("--group", metavar="ID", help="Only this group")
@click.option("--min-reward", type=float, metavar="X", help="Only rewards of X or more")
@click.option("--max-reward", type=float, metavar="X", help="Only rewards of X or less")
@click.option("--tool-errors", is_flag=True, help="Only episodes with failed tool calls")
@click.option("--label", metavar="NAME", help="Only episodes with this label, on the whole or on a turn (fleetbus label)")
@click.option("--text", metavar="WORDS", help="Only episodes in one turn of which all of these words were said")
@click.option("--limit", type=int, default=SHOWN, show_default=True, help="Maximum number of rows; 0: all")
@click.option("--tokens", is_flag=True, help="With EPISODE: also show token ids, versions, both log-probabilities")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all matching rows to FILE instead: .parquet (needs pyarrow), .csv or .jsonl; with EPISODE its conversation as "
    "JSON, as environment.examples takes it",
)
@click.option(
    "--format", "file_format", type=click.Choice(["atif", "eval"]),
    help="Write whole episodes to --output instead: atif, trajectories of ATIF 1.8 (FILE.jsonl, or a folder of a file each); "
    "eval, a log that Inspect View opens (FILE.eval)",
)  # fmt: skip
@json_option()
@archive_option()
@reach_options
def command(
    source: str | None,
    episode: str | None,
    archive: Path | None,
    output: Path | None,
    file_format: str | None,
    tokens: bool,
    as_json: bool,
    text: str | None,
    limit: int,
    **values: Any,
) -> int:
    """List the episodes of a run or of a recording, newest last; with an EPISODE show its transcript.

    Exit status 0: success, also if nothing matches; 2: bad input, or unknown episode.
    """
    from fleetbus.recording.episodes import EpisodeRow
    from fleetbus_workers.api.reader import open_configured_run

    check_outcome(values["outcome"])
    filters = {name: values.pop(name) for name in FILTERS}
    given = {} if is_recording(source) else {"run__name": source}
    configuration = load_settings({**values, **given}).configuration
    reader = open_configured_run(configuration, source or "", archive)
    if file_format is not None:
        file = check_output(file_format, output)
        if episode is not None:
            run_async(reader.read_transcript, episode)  # there is one of that name
        rows = run_async(reader.read_episodes) if episode is None else []
        names = {row.episode_id for row in rows if matches(row, **filters)} if episode is None else {episode}
        return write_episodes(source or "", configuration, archive, names, file_format, file)
    if episode is not None:
        trained = None
        if tokens:
            transcript, trained = run_async(reader.read_transcript_and_tokens, episode)
        else:
            transcript = run_async(reader.read_transcript, episode)
        _warn(reader.damage)
        if output is not None:
            return _write_example(transcript, output)
        if as_json:
            print_json(build_facts(transcript, tokens=tokens, trained=trained))
        else:
            print_transcript(transcript, episode, tokens=tokens, trained=trained)
        return FINISHED
    if output is not None:
        check_format(output)
    rows = run_async(reader.read_episodes)
    _warn(reader.damage)
    chosen = [row for row in rows if matches(row, **filters)]
    found: Mapping[str, Found] = {}
    if text is not None:
        chosen, found = search_text(reader, text, chosen, limit if output is None else 1)
    if output is not None:
        columns = list_columns(EpisodeRow)
        print(f"{write_rows(build_rows(chosen, columns), output, columns):,} of {len(rows):,} episodes written to {output}")
        return FINISHED
    shown = chosen[-limit:] if limit > 0 else chosen
    if as_json:
        print_json(
            shown if text is None else [{**msgspec.structs.asdict(row), "found": found[row.episode_id]} for row in shown]
        )
    else:
        _print_rows(shown, len(chosen), len(rows))
        print_found(found)
        _print_failures(reader.failures.kinds, source or configuration.run.name)
    return FINISHED


def _write_example(transcript: Transcript, output: Path) -> int:
    from fleetbus.recording.episodes import build_example

    messages = build_example(transcript)
    replace_file(output, msgspec.json.format(msgspec.json.encode(messages), indent=1) + b"\n")
    print(f"{len(messages)} messages written to {output}; `--environment-examples {output}` shows them before each task")
    return FINISHED


def check_outcome(name: str | None) -> None:
    known = ("open", *get_args(Outcome))
    if name is not None and name not in known:
        raise UserError(f"unknown outcome {name!r}: choose one of {', '.join(known)}")


def matches(
    row: EpisodeRow,
    *,
    outcome: str | None,
    error: str | None,
    split: str | None,
    task: str | None,
    group: str | None,
    min_reward: float | None,
    max_reward: float | None,
    tool_errors: bool,
    label: str | None,
) -> bool:
    if outcome is not None and (row.outcome or "open") != outcome:
        return False
    if (min_reward is not None or max_reward is not None) and row.reward is None:
        return False
    return (
        (error is None or error in row.error_class)
        and (split is None or row.split == split)
        and (task is None or task in row.task_key)
        and (group is None or row.group_id == group)
        and (min_reward is None or (row.reward or 0.0) >= min_reward)
        and (max_reward is None or (row.reward or 0.0) <= max_reward)
        and (not tool_errors or row.tool_errors > 0)
        and (label is None or label in row.labels)
    )


def _warn(torn: str) -> None:
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)


def _print_rows(rows: list[EpisodeRow], matching: int, total: int) -> None:
    table = build_table("episode,task,outcome", right="reward,turns,tokens,time,version")
    for column in table.columns[:3]:
        column.overflow = "fold"
    if is_labeled := any(row.labels for row in rows):
        table.add_column("labels", overflow="fold")
    for row in rows:
        outcome = f"{row.outcome or 'open'} {row.error_class}".strip()
        reward = "" if row.reward is None else f"{row.reward:g}"
        seconds = "" if row.seconds is None else f"{row.seconds:.2f} s"
        versions = ",".join(map(str, row.policy_versions))
        cells = [row.episode_id, row.task_key, outcome, reward, str(row.turns), str(row.tokens), seconds, versions]
        table.add_row(*cells, *([" ".join(row.labels)] if is_labeled else []))
    print_table(table)
    hidden = f", the last {len(rows)} shown (--limit 0: all)" if len(rows) < matching else ""
    print(f"{matching:,} of {total:,} episodes{hidden}")


def _print_failures(failures: Sequence[FailureKind], source: str) -> None:
    """Print why episodes of the run have no grade, the most frequent reason first."""
    kinds = sorted(failures, key=lambda kind: -kind.count)
    for kind in kinds[:SHOWN_FAILURES]:
        print(f"{kind.line}; `fleetbus episodes {source} {kind.episode_id}` shows one")
    if len(kinds) > SHOWN_FAILURES:
        print(f"and {len(kinds) - SHOWN_FAILURES} other kinds of failure")
