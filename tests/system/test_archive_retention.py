"""An archive that forgets: what a learner still needs stays, and the audit says what is gone; in memory and on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_archive, audit_run, find_removed
from fleetbus.config.settings import ArchiveSettings, LearnerSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_format import list_segments
from fleetbus.log.archive_reader import read_archive, scan_archive_and_log
from fleetbus.log.archive_retention import read_removed
from fleetbus_workers.learner.digest_audit import audit_digests
from fleetbus_workers.recorder.archive_places import open_archive_places
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.connections import Connect, connections_to
from tests.system.test_settled_for_good import GROUP_SIZE, GROUPS, Deployment, S, declare

STEPS = 36
KEPT_BYTES = 8 << 10


@pytest.fixture(params=["memory", "nats"])
async def connections(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    async with connections_to(request.param, "settled", tmp_path) as connect:
        yield connect


class Forgetful(Deployment):
    """A deployment whose archive keeps so many bytes."""

    def __init__(self, connections: Connect, folder: Path, **recorder: Any) -> None:
        super().__init__(connections, folder)
        learner = LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=1)
        self.configuration = msgspec.structs.replace(
            self.configuration, learner=learner, recorder=ArchiveSettings(keep_bytes=KEPT_BYTES, **recorder)
        )

    async def record(self, drain: anyio.Event) -> None:
        settings = RecorderSettings(
            batch_seconds=0.05, trim_seconds=0.1, settle_seconds=0.2, keep_seconds=0.1, segment_bytes=KEPT_BYTES // 2
        )
        async with self._connections("recorder") as bus:
            await run_recorder(
                bus, configuration=self.configuration, name="recorder", drain=drain, folder=self.archive, settings=settings
            )

    async def train_a_run(self) -> None:
        recorded = anyio.Event()
        async with self._connections("test") as bus, anyio.create_task_group() as group:
            await declare(bus)
            for work in (self.play, self.infer):
                group.start_soon(work)
            group.start_soon(self.record, recorded)
            await self.train()
            while not any(self.archive.glob("removed.json")):  # noqa: ASYNC110  # nobody is told of a removal
                await anyio.sleep(0.05)
            self.drain.set()
            await anyio.sleep(0.5)
            recorded.set()


@pytest.mark.integration
@pytest.mark.timeout(150)
async def test_the_oldest_leave_an_archive_and_the_audit_of_the_rest_finds_nothing_and_says_what_is_gone(
    connections: Connect, tmp_path: Path
) -> None:
    with anyio.fail_after(120):
        deployment = Forgetful(connections, tmp_path)
        await deployment.train_a_run()
        async with connections("test") as bus:
            report = await audit_run(bus, S, archive=deployment.archive)

            async def scan() -> Any:
                async for entry in scan_archive_and_log(bus, S, deployment.archive):
                    yield entry

            proof = await audit_digests(
                scan, last_sequence=report.last_sequence, removed=await find_removed(bus, deployment.archive)
            )
            with pytest.raises(UserError, match="were trimmed: give --archive"):
                await audit_run(bus, S)
    begins = read_removed(deployment.archive).below
    assert begins > 1
    assert next(iter(read_archive(deployment.archive))).sequence == begins == report.begins
    assert report.findings == proof.findings == ()
    assert not report.balanced
    assert not report.whole
    assert report.unproven[0] == f"anything of entries 1 to {begins - 1}, which the archive's retention removed"
    assert 0 < report.books.trained < STEPS * GROUPS * GROUP_SIZE
    assert 0 < proof.proven < STEPS * GROUPS * GROUP_SIZE
    assert report.books.trained <= proof.proven + proof.unread, "of an episode the request alone may have left"
    assert report.books.requested == report.books.accounted
    assert report.reached["default"].step == STEPS
    assert (await audit_archive(S, deployment.archive)).begins == begins


@pytest.mark.integration
@pytest.mark.timeout(150)
async def test_what_leaves_the_folder_is_in_the_store_and_both_together_are_the_whole_run(
    connections: Connect, tmp_path: Path
) -> None:
    with anyio.fail_after(120):
        deployment = Forgetful(connections, tmp_path, store=(tmp_path / "store").as_uri())
        await deployment.train_a_run()
        places = (str(deployment.archive), deployment.configuration.recorder.store)
        async with connections("test") as bus:
            with open_archive_places(places) as folder:
                report = await audit_run(bus, S, archive=folder)
    assert read_removed(deployment.archive).below > 1
    assert len(list_segments(tmp_path / "store")) > len(list_segments(deployment.archive))
    assert report.balanced
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE
    with open_archive_places(places[1:]) as folder:  # the folder is lost, and the server with it
        alone = await audit_archive(S, folder)
    assert alone.balanced
    assert alone.books == report.books
