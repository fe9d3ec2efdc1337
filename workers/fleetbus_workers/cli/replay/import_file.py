"""``fleetbus import FILE -o RUN.fbrec``: ATIF trajectories or a log of Inspect as a recording. 0: written; 2: bad input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetbus.errors import UserError
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.exit_status import FINISHED

if TYPE_CHECKING:
    from fleetbus.bus.base import StreamEntry
    from fleetbus_schemas import Split


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write (.fbrec)")
@click.option("--run", "run", default="imported", show_default=True, metavar="NAME", help="Name of the run in the recording")
@click.option(
    "--split", type=click.Choice(["train", "eval"]), default="train", show_default=True, help="Split of episodes that have none"
)
@click.option("--score", default="", metavar="NAME", help="The score of an Inspect log that is the reward (default: its first)")
@click.option("--force", is_flag=True, help="Replace an existing output file")
@json_option("what was written")
def command(files: tuple[Path, ...], output: Path, run: str, split: Split, score: str, force: bool, as_json: bool) -> int:
    """Import episodes of other tools as a recording, which `regrade`, `learn` and `episodes` read.

    FILE is a trajectory in ATIF (.json), one of them per line (.jsonl), a folder of them or of Harbor's trials,
    or a log of Inspect (.eval). Token ids are taken as they are and never made from text: an episode without them can be
    graded again, and is not trained on. Nothing that a file names is run.
    """
    from fleetbus.interchange.assembly import Assembler

    try:
        check_name("run", run)
    except InvalidName as error:
        raise UserError(str(error)) from error
    assembler, facts = Assembler(run, split), _Facts()
    _write(output, run, facts.count(files, score, assembler), overwrite=force)
    said = {"file": str(output), "run": run, "entries": assembler.sequence, **facts.counts}
    if as_json:
        print_json(said)
    else:
        print(f"{facts.counts['episodes']:,} episodes, {assembler.sequence:,} entries of run {run}: {output}")
        for reason in ("without_token_ids", "without_logprobs", "without_reward"):
            if facts.counts[reason]:
                print(f"{facts.counts[reason]:,} {_SAID[reason]}")
    return FINISHED


_SAID = {
    "without_token_ids": "without token ids: they can be graded again, and `fleetbus learn` leaves them out",
    "without_logprobs": "with token ids and without log-probabilities: they stand as 0",
    "without_reward": "without a reward: `fleetbus regrade` gives one, `fleetbus learn` leaves them out",
}


class _Facts:
    """Counts of what was imported."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(("episodes", *_SAID), 0))

    def count(self, files: tuple[Path, ...], score: str, assembler: Any) -> Iterator[list[StreamEntry]]:
        """The entries of each episode of ``files``."""
        from fleetbus.interchange.files import iterate_episodes

        for file in files:
            for episode in iterate_episodes(file, score=score):
                tokens = [turn.tokens for turn in episode.turns]
                reward = episode.result.reward if episode.result is not None else episode.facts.get("reward")
                self.counts["episodes"] += 1
                self.counts["without_token_ids"] += None in tokens
                self.counts["without_logprobs"] += any(each is not None and each.logprobs is None for each in tokens)
                self.counts["without_reward"] += reward is None
                yield assembler.assemble(episode)
        if not self.counts["episodes"]:
            raise UserError(f"{', '.join(map(str, files))}: there is no episode in it")


def _write(output: Path, run: str, entries: Iterator[list[StreamEntry]], *, overwrite: bool) -> None:
    import time

    from fleetbus.package_version import read_fleetbus_version
    from fleetbus.recording.format import RecordingHeader, compute_message_schema
    from fleetbus.recording.writer import create_recording

    header = RecordingHeader(
        run=run,
        fleetbus=read_fleetbus_version(),
        messages=compute_message_schema(),
        created_ns=time.time_ns(),
        redacted=False,
    )
    with create_recording(output, header, overwrite=overwrite) as writer:
        for episode in entries:
            writer.add(episode)
