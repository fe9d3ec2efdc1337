"""``fleetbus label RUN EPISODE``: labels and comments of an episode, stored in the run's log. 0: stored; 2: bad input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetbus.errors import UserError
from fleetbus_schemas import EpisodeLabeled, Subjects
from fleetbus_workers.cli.look.run_options import archive_option, reach_options
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name
from fleetbus_workers.run_access.sources import is_recording

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.core.episode.labels import EpisodeLabels


@click.command("label")
@click.argument("run", metavar="RUN")
@click.argument("episode", metavar="EPISODE")
@click.option("--turn", type=click.IntRange(0), metavar="N", help="Label this turn instead of the whole episode")
@click.option("--add", multiple=True, metavar="NAME", help="Put a label on; may be repeated")
@click.option("--remove", multiple=True, metavar="NAME", help="Take a label off; may be repeated")
@click.option("--comment", default="", metavar="TEXT", help="Add a comment")
@click.option(
    "--replace", "replaces", type=click.IntRange(1), metavar="NUMBER",
    help="Let --comment take the place of this comment; without --comment: remove it",
)  # fmt: skip
@click.option("--author", metavar="NAME", help="Who says so [the command with its host and process]")
@json_option("all labels and comments of the episode")
@archive_option()
@reach_options
def command(
    run: str,
    episode: str,
    turn: int | None,
    add: tuple[str, ...],
    remove: tuple[str, ...],
    comment: str,
    replaces: int | None,
    author: str | None,
    as_json: bool,
    archive: Path | None,
    **values: Any,
) -> int:
    """Label an episode of a run, or one turn of it, or comment on it. The policy and its training never see this.

    It is stored in the run's log, also after the run has ended: `fleetbus episodes RUN EPISODE` shows it, `--label NAME` finds
    it, and `fleetbus record` takes it along. On a server with keys it needs the operator's.

    Exit status 0: stored; 2: bad input, unknown episode, or a key that only reads.
    """
    if is_recording(run):
        raise UserError(f"{run} is a recording, which nothing is added to: name the run")
    if not (add or remove or comment.strip() or replaces):
        raise UserError("nothing to store: give --add, --remove, --comment or --replace")
    message = EpisodeLabeled(
        episode_id=validate_name("episode", episode),
        turn=turn,
        add=tuple(dict.fromkeys(add)),
        remove=tuple(dict.fromkeys(remove)),
        comment=comment.strip(),
        replaces=replaces or 0,
        author=author or generate_worker_name("label"),
    )
    configuration = load_settings({**values, "run__name": run}).configuration
    found = run_async(_store, configuration, message, archive)
    if as_json:
        print_json({"labels": found.labels, "comments": found.comments})
    else:
        comments = len(found.comments)
        said = f", {comments} comment{'' if comments == 1 else 's'}" if comments else ""
        print(f"{episode}: {' '.join(found.names) or 'no label'}{said}")
    return FINISHED


async def _store(configuration: Configuration, message: EpisodeLabeled, archive: Path | None) -> EpisodeLabels:
    from fleetbus.log.archive_reader import scan_archive
    from fleetbus.log.labels import store_labels

    subjects, name = Subjects(configuration.run.name), message.episode_id
    archived = []
    if archive is not None:
        entries = scan_archive(archive, run=subjects.run)
        kinds = (subjects.tasks().removesuffix(">"), subjects.label(name))
        archived = [each async for each in entries if each.subject.startswith(kinds) and each.subject.endswith(f".{name}")]
    async with open_run(configuration, "label", own_server=True) as bus:
        return await store_labels(bus, subjects, message, archived=archived)
