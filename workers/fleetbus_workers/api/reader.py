"""Reading a run: its episodes, transcripts, tokens and metrics, from a live log, the files of a stopped run, or a recording.

Above it are `fleetbus.open_run` and `fleetbus episodes`; below it the sources of entries and the folds of them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetbus.config.load import find_default_file, load_configuration
from fleetbus.config.run_folder import read_earlier_configuration, run_folder
from fleetbus.config.settings import Configuration
from fleetbus.core.episode.failure_kinds import FailureKinds
from fleetbus.errors import UserError
from fleetbus.recording.episodes import EpisodeIndex, EpisodeRow, Transcript, build_episode_subjects, read_transcript
from fleetbus.recording.rows import StepFold, StepRow, TokenRow, build_token_row
from fleetbus.recording.said_text import list_said_subjects
from fleetbus.recording.text_index import TextIndex
from fleetbus.recording.text_indexing import open_text_index, update_from_log, update_text_index
from fleetbus.recording.token_record import TrainedTokens
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.api.own_loop import iterate_in_own_loop
from fleetbus_workers.api.tables import (
    Columns,
    ColumnType,
    Row,
    build_arrow_table,
    build_data_frame,
    build_rows,
    list_columns,
    write_rows,
)
from fleetbus_workers.run_access.log_access import is_reachable
from fleetbus_workers.run_access.sources import Source, is_recording, open_source

T = TypeVar("T")

ROW_TYPES: Mapping[str, type[msgspec.Struct]] = {"episodes": EpisodeRow, "tokens": TokenRow, "metrics": StepRow}
"""What can be had as a table."""


class RunReader:
    """Reads what a run has written, anew by every call: each opens what it needs and closes it at its end.

    Iterators stream and block the calling thread. Of a run whose server is stopped its files are served meanwhile. Raises
    `UserError` when the log cannot be read.
    """

    def __init__(self, source: str, configuration: Configuration, archive: Path | None = None) -> None:
        self._source = source
        self._configuration = configuration
        self._archive = archive
        self.damage = ""
        """What is missing at the end of a recording that was cut off, in one line, once it was read to its end."""
        self.failures = FailureKinds()
        """Why episodes have no grade, once `episodes` were read."""

    def episodes(self) -> Iterator[EpisodeRow]:
        """One row per episode, in the order of their requests."""
        return iterate_in_own_loop(self._stream_episodes)

    def transcripts(self) -> Iterator[Transcript]:
        """The transcript of each episode, in the order in which they finished; those without a result come last."""
        return iterate_in_own_loop(self._stream_transcripts)

    def transcript(self, episode_id: str) -> Transcript:
        """The transcript of one episode. Raises `UserError` if there is none of that name."""
        (found,) = iterate_in_own_loop(partial(self._stream_transcript, episode_id))
        return found

    def tokens(self) -> Iterator[TokenRow]:
        """Token ids, mask, policy versions and log-probabilities of sampler and trainer of each episode, in the order of
        `transcripts`."""
        return iterate_in_own_loop(self._stream_tokens)

    def metrics(self) -> Iterator[StepRow]:
        """One row per training step that counts: those of a learner that was replaced may not."""
        return iterate_in_own_loop(self._stream_metrics)

    def to_arrow(self, what: str = "episodes") -> Any:
        """A `pyarrow.Table` of ``episodes``, ``tokens`` or ``metrics``. Raises `UserError` without pyarrow."""
        return build_arrow_table(*self._get_rows(what))

    def to_pandas(self, what: str = "episodes") -> Any:
        """A `pandas.DataFrame` of ``episodes``, ``tokens`` or ``metrics``. Raises `UserError` without pandas."""
        return build_data_frame(*self._get_rows(what))

    def write(self, file: str | os.PathLike[str], what: str = "episodes") -> int:
        """Write ``episodes``, ``tokens`` or ``metrics`` to a file that ends in .parquet (needs pyarrow), .csv or .jsonl;
        returns the number of rows. Raises `UserError`."""
        rows, columns = self._get_rows(what)
        return write_rows(rows, Path(file), columns)

    async def read_episodes(self) -> list[EpisodeRow]:
        """`episodes` for an event loop."""
        return [row async for row in self._stream_episodes()]

    async def read_transcript(self, episode_id: str) -> Transcript:
        """`transcript` for an event loop."""
        async with self._open_episode(episode_id) as (_, transcript):
            return transcript

    async def read_transcript_and_tokens(self, episode_id: str) -> tuple[Transcript, TrainedTokens | None]:
        """`read_transcript`, and the trainer's part of its tokens: None if it was not trained or no record is kept."""
        async with self._open_episode(episode_id) as (source, transcript):
            return transcript, (await self._index_trained(source)).find(episode_id)

    @asynccontextmanager
    async def _open_episode(self, episode_id: str) -> AsyncIterator[tuple[Source, Transcript]]:
        try:
            check_name("episode", episode_id)
        except InvalidName as error:
            raise UserError(str(error)) from error
        async with open_source(self._source, self._configuration, self._archive) as source:
            entries = [entry async for entry in source.entries(build_episode_subjects(source.subjects, episode_id))]
            self.damage = source.torn
            if not entries:
                raise UserError(f"there is no episode {episode_id} in {self._source}: `fleetbus episodes` lists them")
            yield source, read_transcript(entries)

    @asynccontextmanager
    async def open_text_index(self) -> AsyncIterator[TextIndex]:
        """The full-text index over what was said, with all that is stored now: of a run's log a file in the run's folder, else
        a temporary one. Raises `sqlite3.Error` if the disk is full."""
        async with open_source(self._source, self._configuration, self._archive) as source:
            if source.bus is not None and self._archive is None:
                created = (await source.bus.log_state()).created
                async with open_text_index(run_folder(self._configuration.run).text_index, created) as index:
                    await update_from_log(index, source.bus, source.subjects)
                    yield index
                return
            async with open_text_index(None, "") as index:
                await update_text_index(index, lambda _: source.entries(list_said_subjects(source.subjects)))
                self.damage = source.torn
                yield index

    async def _index_trained(self, source: Source) -> TrainedTokensIndex:
        run = msgspec.structs.replace(self._configuration.run, name=source.subjects.run)
        index = TrainedTokensIndex(run_folder(run).tokens)
        async for entry in source.entries([source.subjects.train("*")]):
            index.add(entry)
        return index

    async def _stream_tokens(self) -> AsyncIterator[TokenRow]:
        async with open_source(self._source, self._configuration, self._archive) as source:
            index = await self._index_trained(source)
            async for transcript in source.transcripts():
                result = transcript.result
                yield build_token_row(transcript, index.find(result.episode_id) if result is not None else None)
            self.damage = source.torn

    async def _stream_episodes(self) -> AsyncIterator[EpisodeRow]:
        index = EpisodeIndex()
        async with open_source(self._source, self._configuration, self._archive) as source:
            async for entry in source.entries([source.subjects.tasks(), source.subjects.episodes, source.subjects.labels]):
                index.add(entry)
            self.damage = source.torn
        self.failures = index.failures
        for row in index.rows.values():
            yield row

    async def _stream_transcripts(self) -> AsyncIterator[Transcript]:
        async with open_source(self._source, self._configuration, self._archive) as source:
            async for transcript in source.transcripts():
                yield transcript
            self.damage = source.torn

    async def _stream_metrics(self) -> AsyncIterator[StepRow]:
        fold = StepFold()
        async with open_source(self._source, self._configuration, self._archive) as source:
            async for entry in source.entries([source.subjects.train(self._configuration.run.policy)]):
                fold.add(entry)
            self.damage = source.torn
        for row in fold.rows():
            yield row

    async def _stream_transcript(self, episode_id: str) -> AsyncIterator[Transcript]:
        yield await self.read_transcript(episode_id)

    def _get_rows(self, what: str) -> tuple[Iterable[Row], Columns]:
        if what not in ROW_TYPES:
            raise UserError(f"unknown table {what!r}: choose one of {', '.join(ROW_TYPES)}")
        if what == "metrics":
            return _build_metric_rows(list(self.metrics()))
        columns = list_columns(ROW_TYPES[what])
        return build_rows(self.episodes() if what == "episodes" else self.tokens(), columns), columns


def _build_metric_rows(steps: Sequence[StepRow]) -> tuple[list[Row], dict[str, ColumnType]]:
    """Steps with a column for each metric that any of them has, and the columns."""
    columns = {name: kind for name, kind in list_columns(StepRow).items() if name != "metrics"}
    metrics: dict[str, ColumnType] = {name: "number" for step in steps for name in step.metrics if name not in columns}
    return [{**step.metrics, **row} for step, row in zip(steps, build_rows(steps, columns), strict=True)], columns | metrics


def open_run(
    source: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    nats_url: str | None = None,
    archive: str | os.PathLike[str] | None = None,
) -> RunReader:
    """A reader of a run: ``source`` is its name, its folder, or a recording (`fleetbus record`).

    ``folder`` holds a folder per run (the configured one); ``nats_url``: the server, of a run elsewhere; ``archive``: the
    recorder's folder, for a log that was trimmed. Raises `UserError` if there is no such run.
    """
    text, path = os.fspath(source), Path(source).expanduser()
    flags: dict[str, Any] = {"run.folder": os.fspath(folder)} if folder is not None else {}
    flags |= {"nats.url": nats_url} if nats_url is not None else {}
    if is_recording(text):
        if not path.is_file():
            raise UserError(f"there is no recording {text}: `fleetbus record` creates one")
    elif path.is_dir() and any((path / name).exists() for name in ("run.json", "config.json", "nats")):
        resolved = path.resolve()
        flags |= {"run.name": resolved.name, "run.folder": str(resolved.parent)}
    else:
        flags["run.name"] = text
    loaded = load_configuration(
        file=find_default_file(Path.cwd()), variables=os.environ, flags=flags, earlier=read_earlier_configuration
    )
    reader = RunReader(text, loaded.configuration, Path(archive) if archive is not None else None)
    run = run_folder(loaded.configuration.run)
    is_there = is_recording(text) or archive is not None or run.store.is_dir() or is_reachable(loaded.configuration)
    if not is_there:
        raise UserError(
            f"there is no run {run.path.name} in {run.path.parent}: `fleetbus runs list` shows them, or give nats_url"
        )
    return reader


def open_configured_run(configuration: Configuration, source: str = "", archive: Path | None = None) -> RunReader:
    """A reader of the run that a configuration names, or of the recording ``source``."""
    return RunReader(source or configuration.run.name, configuration, archive)
