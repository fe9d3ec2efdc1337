"""Recordings that somebody else made, and what every command makes of their entries.

An input is bytes of a file, or msgpack of a header and parts, ``[HEADER, [KIND, CONTENT], ...]``, whose payloads may be trees;
these are encoded, compressed and framed with right check sums, which no fuzzer guesses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.audit.run import enter
from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit.books import Audit
from fleetbus.core.diagnosis.diagnose import diagnose
from fleetbus.core.diagnosis.fold import DiagnosisFold
from fleetbus.errors import UserError
from fleetbus.interchange.atif_export import build_trajectory, encode_trajectory
from fleetbus.interchange.eval_samples import build_sample
from fleetbus.log.archive_format import encode_frame
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.episodes import EpisodeIndex, Transcript, build_example
from fleetbus.recording.format import MAGIC
from fleetbus.recording.reader import load_recording
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.rows import StepFold, TranscriptFold, build_token_row
from fleetbus.recording.said_text import find_said_text
from fleetbus.recording.usage import UsageFold
from fleetbus_workers.cli.look.transcript import build_facts
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.tracing.fold import LogTraces
from tests.fuzz.mutation import write_msgpack
from tests.fuzz.targets import ROOT, make_folder

_FOLDER = make_folder()


def run(data: bytes) -> None:
    """Load it, and fold its entries as audit, diagnosis, usage, page, traces and export do."""
    file = Path(_FOLDER.name, "a.fbrec")
    file.write_bytes(build_recording(data))
    try:
        recording = load_recording(file)
    except UserError as refused:
        assert str(refused)
        return
    _fold(recording.entries)


def _fold(entries: list[StreamEntry]) -> None:
    audit, index, state, usage, diagnosis = Audit(), EpisodeIndex(), RunState(3), UsageFold(), DiagnosisFold()
    redactor, steps, traces, transcripts = Redactor(), StepFold(), LogTraces("run", content=True), TranscriptFold()
    found: list[Transcript] = []
    for entry in entries:
        redactor.clean(entry)
        try:
            enter(audit, entry)
        except ValueError:
            audit = Audit()  # the audit of a recording refuses what is in no order
        if (message := read_stored(entry)) is None:
            continue
        index.apply(entry, message)
        state.apply(entry, message, 1.0, entry.time_ns)
        usage.apply(message, entry.sequence, entry.time_ns)
        diagnosis.apply(message, entry.sequence, entry.time_ns)
        list(traces.add(entry))
        kind = entry.subject.split(".", 3)[2]
        if kind == "train":
            steps.add(entry)
        if kind in ("obs", "act"):
            find_said_text(entry)
        if kind in ("task", "obs", "act", "episode") and (transcript := transcripts.add(entry)) is not None:
            found.append(transcript)
    for each in (audit.report(), list(index.rows.values()), state.groups(), state.count_open(), usage.build(), steps.rows()):
        msgspec.json.encode(each)
    diagnose(diagnosis.build())
    for transcript in (*found, *transcripts.unfinished()):
        _show(transcript)


def _show(transcript: Transcript) -> None:
    msgspec.json.encode(build_facts(transcript, tokens=True))
    build_token_row(transcript)
    for build in (
        lambda: encode_trajectory(build_trajectory(transcript, run="run", version="1")),
        lambda: msgspec.json.encode(build_sample(transcript, "run", name="s", epoch=1, model="m")),
        lambda: build_example(transcript),
    ):
        try:
            build()
        except UserError as refused:
            assert str(refused)


def build_recording(data: bytes) -> bytes:
    """The file that an input means."""
    try:
        header, *parts = msgspec.msgpack.decode(data, type=list[Any])
        frames = [encode_frame(write_msgpack(header))]
        for kind, content in parts:
            if kind == "E":
                content = [[*entry[:3], _encode(entry[3])] for entry in content]
            packed = zlib.compress(_encode(content), 1)
            frames.append(encode_frame(kind.encode() + packed))
    except (
        msgspec.MsgspecError,
        UnicodeError,
        ValueError,
        RecursionError,
        OverflowError,
        TypeError,
        LookupError,
        AttributeError,
    ):
        return data
    return MAGIC + b"".join(frames)


def _encode(payload: Any) -> bytes:
    return payload if isinstance(payload, bytes) else write_msgpack(payload)


TREE = (msgspec.msgpack.decode, msgspec.msgpack.encode)


def list_seeds() -> Iterator[bytes]:
    """The recordings of the tests: their first bytes, and their entries as trees, a few at a time."""
    for file in sorted((ROOT / "tests/kept").glob("*.fbrec")):
        yield file.read_bytes()
        recording = load_recording(file)
        header, end = {"run": recording.run, "format": 1}, ["Z", [1, 1]]
        entries = [
            [each.sequence, each.time_ns, each.subject, msgspec.msgpack.decode(each.payload)] for each in recording.entries
        ]
        part = ["F", ["objects/a", 0, b"x", True]]
        for start in range(0, len(entries), 8):
            yield msgspec.msgpack.encode([header, ["E", entries[start : start + 8]], part, end])
        for names in list({each[2].rpartition(".")[2] for each in entries if each[2].split(".")[2] == "episode"})[:2]:
            yield msgspec.msgpack.encode([header, ["E", [each for each in entries if each[2].endswith(f".{names}")]], end])
