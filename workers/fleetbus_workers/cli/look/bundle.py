"""``fleetbus bundle RUN|FILE -o DIR``: the page of a run as a folder of files, which opens without fleetbus."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetbus_schemas.names import is_name
from fleetbus_workers.cli.look.episodes import FILTERS, check_outcome, matches
from fleetbus_workers.cli.look.episodes import command as episodes_command
from fleetbus_workers.cli.look.run_options import archive_option, reach_options, source_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.sources import Source, is_recording, open_source

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.recording.episodes import EpisodeRow
    from fleetbus.recording.redaction import Redactor
    from fleetbus_workers.observe.bundle.folder import BundleFolder

NEWEST = 200
MOST_IMAGES_BYTES = 256 << 20
OBJECT_SECONDS = 20.0


@click.command("bundle")
@source_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder; an earlier copy is replaced",
)
@click.option(
    "--limit", type=click.IntRange(0), default=NEWEST, show_default=True, metavar="N",
    help="The newest N episodes that match have their transcripts in it; 0: all",
)  # fmt: skip
@archive_option()
@reach_options
def command(source: str | None, output: Path, limit: int, archive: Path | None, **values: Any) -> int:
    """Copy the page of a run, or of a recording, into a folder: overview, curves, groups, tasks, and episodes with their
    transcripts, tokens, images and labels.

    Open DIR/index.html in a browser, from the disk or from any server of files; nothing else is needed. Secrets are replaced by
    [redacted] as in recordings; the content of images is not checked. Exit status 0: written; 2: bad input, or a folder with
    something else in it, and nothing was written.
    """
    from fleetbus_workers.observe.bundle.folder import check_folder, write_folder

    check_outcome(values["outcome"])
    check_folder(output)
    filters = {name: values.pop(name) for name in FILTERS}
    configuration = load_settings({**values, **({} if is_recording(source) else {"run__name": source})}).configuration
    with write_folder(output) as folder:
        line, torn = run_async(_copy, source, configuration, archive, folder, filters, limit)
    if torn:
        click.echo(f"fleetbus: {torn}", err=True)
    print(f"{line}: {output / 'index.html'} ({folder.bytes / 1e6:.1f} MB)")
    return FINISHED


command.params += [each for each in episodes_command.params if each.name in FILTERS]


async def _copy(
    name: str | None,
    configuration: Configuration,
    archive: Path | None,
    folder: BundleFolder,
    filters: dict[str, Any],
    limit: int,
) -> tuple[str, str]:
    """Write the copy; returns what is in it in a line, and what is missing at the end of a recording."""
    import anyio.to_thread

    from fleetbus.config.run_folder import run_folder
    from fleetbus.config.seats import list_joined_policies
    from fleetbus.recording.redaction import Redactor, find_environment_secrets
    from fleetbus.recording.trained_tokens import TrainedTokensIndex
    from fleetbus_workers.assembly.model import find_model_folder
    from fleetbus_workers.observe.bundle.copied_run import RunCopier
    from fleetbus_workers.observe.monitor.token_decoder import load_token_decoder

    redactor = Redactor(find_environment_secrets(os.environ))
    async with open_source(name, configuration, archive) as source:
        run = msgspec.structs.replace(configuration.run, name=source.subjects.run)
        words = await anyio.to_thread.run_sync(load_token_decoder, find_model_folder(run))
        copier = RunCopier(
            source.entries,
            source.subjects,
            redactor,
            TrainedTokensIndex(run_folder(run).tokens),
            steps=configuration.learner.steps,
            threshold=configuration.evaluation.success_threshold,
            now_ns=time.time_ns(),
            joined=list_joined_policies(run),
        )
        used, limit_bytes = await _measure_log(source)
        await copier.read_run(used_bytes=used, limit_bytes=limit_bytes)
        rows = list(copier.state.episodes.rows.values())
        matching = [row for row in rows if matches(row, **filters)]
        chosen = matching[-limit:] if limit else matching
        files = {row.episode_id: f"e{number:06}" for number, row in enumerate(chosen)}

        async def write(episode: str, facts: dict[str, Any]) -> None:
            await anyio.to_thread.run_sync(folder.add_data, files[episode], facts)

        await copier.copy_episodes(chosen, words, write)
        images = await _add_images(source, list(copier.objects), redactor, folder)
        line = _describe(chosen, len(matching), copier.state.requested)
        folder.add_data("run", copier.describe_run(chosen, files, line))
    await anyio.to_thread.run_sync(folder.add_page)
    return f"{line}{images}", source.torn


async def _measure_log(source: Source) -> tuple[int, int]:
    """Its bytes and the most that it may have; of a recording those of the file."""
    if source.bus is None:
        return (source.file.stat().st_size if source.file is not None else 0), 0
    state = await source.bus.log_state()
    return state.used_bytes, state.limit_bytes


def _describe(chosen: Sequence[EpisodeRow], matching: int, requested: int) -> str:
    newest = f"the newest {len(chosen):,} of " if len(chosen) < matching else ""
    matched = f"{matching:,} that match, of " if matching < requested else ""
    return f"{newest}{matched}{requested:,} episodes"


async def _add_images(source: Source, names: Sequence[str], redactor: Redactor, folder: BundleFolder) -> str:
    """Add those that are images and have no secret to be read in them; returns what there is to say of the others."""
    import anyio

    from fleetbus.bus.objects import ObjectMissing, ObjectTooLarge, get_content
    from fleetbus.errors import BusError, NotPermitted
    from fleetbus_workers.images.image_formats import find_media_type
    from fleetbus_workers.observe.monitor.images import MAX_IMAGE_BYTES
    from fleetbus_workers.weights.store import get_every_object

    store, added, used = get_every_object(source.bus, source.subjects.run) if source.bus is not None else None, 0, 0
    for name in filter(is_name, names):  # it becomes that of a file
        content = source.objects.get(name)
        if content is None and store is not None:
            try:
                with anyio.fail_after(OBJECT_SECONDS):
                    content = await get_content(store, name, max_bytes=MAX_IMAGE_BYTES)
            except NotPermitted:
                break  # a key that may not read one may not read the others
            except (ObjectMissing, ObjectTooLarge, BusError, OSError):  # OSError has TimeoutError below it
                continue
        if content is None or len(content) > MAX_IMAGE_BYTES:
            continue
        if used + len(content) > MOST_IMAGES_BYTES:
            break  # the others would be read for nothing
        if find_media_type(content) and not redactor.finds_secret(content):
            folder.add(f"api/images/{name}", content)
            added, used = added + 1, used + len(content)
    return f", {added:,} of {len(names):,} images" if names else ""
