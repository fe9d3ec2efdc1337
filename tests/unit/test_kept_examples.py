"""Recordings and archives that older versions wrote are read, audited and replayed by this one.

`tests/kept/` has a small run of the starter policy by each version: ``COMMIT.fbrec`` as its `fleetbus record` wrote it, and
where its archive had another form, that in the folder ``COMMIT``. They are never written again
(docs/decisions/0218-kept-examples-and-a-rolling-upgrade.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.audit.run import audit_archive, audit_recording, audit_run
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.log.archive_reader import read_archive
from fleetbus.log.stored_entries import decode_stored
from fleetbus.recording import load_recording
from fleetbus.recording.reader import RecordingReader
from fleetbus_schemas import Subjects
from fleetbus_workers.replay.fixtures import replay_blocking

KEPT = Path(__file__).parents[1] / "kept"
RECORDINGS = sorted(KEPT.glob("*.fbrec"))
SUBJECTS = Subjects("kept")

ARCHIVES = sorted(path for path in KEPT.iterdir() if path.is_dir())

each_version = pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)

pytestmark = pytest.mark.timeout(200)


def test_there_are_examples_of_the_first_version_whose_recordings_stay_readable() -> None:
    assert {"6630e7c1", "49679514"} <= {file.stem for file in RECORDINGS}


@each_version
def test_every_entry_of_an_old_recording_is_a_message_that_is_known(file: Path) -> None:
    recording = load_recording(file)
    assert (recording.run, recording.torn) == ("kept", "")
    assert len([decode_stored(entry) for entry in recording.entries]) > 50


@pytest.mark.parametrize("folder", ARCHIVES, ids=lambda folder: folder.name)
async def test_an_old_archive_has_the_entries_of_the_recording_and_balances(folder: Path) -> None:
    assert list(read_archive(folder, run="kept")) == load_recording(folder.with_suffix(".fbrec")).entries
    assert (await audit_archive(SUBJECTS, folder)).balanced


@each_version
async def test_the_books_of_an_old_run_balance_from_its_recording_and_from_its_log(file: Path) -> None:
    recorded = await audit_recording(RecordingReader(file))
    async with MemoryServer().connect("kept") as bus:
        await bus.declare(plan_run("kept"))
        for entry in load_recording(file).entries:
            await bus.publish(entry.subject, entry.payload)
        logged = await audit_run(bus, SUBJECTS)
    for report in (recorded, logged):
        assert report.balanced, report
        assert (report.books.requested, report.books.trained) == (4, 4)


@pytest.mark.integration
@each_version
def test_an_old_recording_replays_against_the_environment_and_the_learner_of_now(file: Path) -> None:
    assert replay_blocking(file).compared["EpisodeFinished"] == 4
    assert replay_blocking(file, role="learner", until="batches").same
