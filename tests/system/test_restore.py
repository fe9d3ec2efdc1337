"""A run whose server was wiped: its log comes back from the archive, and training goes on at its step; with real processes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.bus.nats import connect
from fleetbus.core.training.retention import KEPT_CHECKPOINTS
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, StepTrained, Subjects
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import read_entries
from tests.support.rig import ENTRIES, S, Site, ended, site
from tests.support.secured_server import secured_server
from tests.support.small_deployment import LANES, RUN
from tests.unit.test_archive_retention import archive_log, build_run

pytestmark = [pytest.mark.timeout(240), pytest.mark.integration]

STOPPED, LAST = 6, 12


@asynccontextmanager
async def recording(place: Site, archive: Path) -> AsyncIterator[None]:
    """A recorder beside the run; it archives what is there when it ends."""
    process = await anyio.open_process(
        place._line("recorder", "--archive", str(archive)), cwd=place.folder, env=place._environment, stdout=None, stderr=None
    )
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            process.send_signal(signal.SIGTERM)
            with anyio.move_on_after(30):
                assert await process.wait() == 0
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def train_some(place: Site, archive: Path) -> None:
    """Until a step has a checkpoint; then everybody stops, the recorder last."""
    assert (await place.command("init"))[0] == 0
    async with recording(place, archive):
        async with place.up() as process:
            await place.until_checkpoint(STOPPED)
            process.send_signal(signal.SIGINT)
            await ended(process)


async def wipe(place: Site) -> None:
    await place.server.kill()
    shutil.rmtree(place.store)
    place.store.mkdir()
    await place.server.restart()


async def read_steps(place: Site, run: str) -> tuple[list[LineageStarted], list[int]]:
    train = Subjects(run).train("default")
    async with connect(place.server.url, run=run, worker="steps") as bus:
        stored = [entry async for entry in bus.scan([train])]
    lineages = [message for _, message in decode_entries(LineageStarted, stored, beside=ENTRIES)]
    return lineages, [message.step for _, message in decode_entries(StepTrained, stored, beside=ENTRIES)]


@pytest.mark.parametrize("run", [pytest.param("default", marks=pytest.mark.slow), "moved"])
async def test_a_run_whose_server_was_wiped_goes_on_at_its_step_and_its_audit_balances(tmp_path: Path, run: str) -> None:
    archive = tmp_path / "archive"
    async with site(tmp_path) as place:
        await train_some(place, archive)
        before = [(entry.sequence, entry.subject, entry.payload) async for entry in place.bus.scan([S.log])]
        await wipe(place)
        status, said = await place.command("restore", str(archive), "--run", run, "--json")
        assert status == 0, said
        facts = json.loads(said)
        assert (facts["run"], facts["source"], facts["begins"], facts["stored"]) == (run, "default", 1, facts["last"])
        assert len(before) - 2 <= facts["last"], "but for the recorder's own last words"
        if run != "default":  # with the checkpoints alone: the folder's settings name the other run
            folder = place.run_folder.parent / run
            shutil.copytree(place.run_folder / "checkpoints", folder / "checkpoints")
            shutil.rmtree(place.run_folder)
        async with connect(place.server.url, run=run, worker="look") as bus:
            after = [(each.sequence, each.subject, each.payload) async for each in bus.scan([Subjects(run).log])]
        renamed = [(at, subject.replace("fb.default.", f"fb.{run}.", 1), payload) for at, subject, payload in before]
        assert after == renamed[: facts["last"]]

        async with place.up("--run", run, "--steps", str(LAST)) as process:
            assert await ended(process) == 0, place.output.read_text()
        lineages, steps = await read_steps(place, run)
        assert lineages[-1].parent_step >= STOPPED
        assert not lineages[-1].restart
        assert sorted(set(steps)) == list(range(1, LAST + 1))
        status, said = await place.command("audit", run, "--deep")
        assert status == 0, said
        assert "the audit balances" in said


async def test_a_lost_log_without_a_backup_goes_on_from_the_checkpoints_at_the_step_that_a_person_names(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        assert (await place.command("init"))[0] == 0
        async with place.up() as process:
            await place.until_checkpoint(STOPPED)
            process.send_signal(signal.SIGINT)
            await ended(process)
        reached = (await place.entries(StepTrained))[-1].step
        await wipe(place)
        async with place.up("--steps", str(LAST)) as process:
            while "--restart-from" not in place.learner_log:  # noqa: ASYNC110  # another process writes it
                await anyio.sleep(0.1)
        offered = place.learner_log.split("--restart-from ")[1].split(" |")[0]
        assert STOPPED <= int(offered) <= reached
        async with place.up("--steps", str(LAST), "--restart-from", offered) as process:
            assert await ended(process) == 0, place.output.read_text()
        lineages, steps = await read_steps(place, "default")
        assert lineages[-1].parent_step == int(offered)
        assert steps == list(range(int(offered) + 1, LAST + 1))
        status, said = await place.command("audit")
        assert status == 1
        assert f"l1/1-{offered}" in said


@pytest.mark.parametrize("begins", ["all", "needed"])
def test_the_admin_restores_on_a_server_with_keys(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    monkeypatch.chdir(tmp_path)
    archive_log(tmp_path / "archive", read_entries(build_run(2 * KEPT_CHECKPOINTS)))
    with secured_server(tmp_path_factory) as server:
        reach = ["--nats", server.server.url, "--nats-auth", str(server.folder)]
        declared = ["--nats-lanes", str(LANES), "--nats-max-bytes", str(1 << 28)]
        options = ["--only-needed"] if begins == "needed" else []
        assert run_program(["restore", "archive", "--run", RUN, *options, *declared, *reach]) == 0
        assert run_program(["init", "--run", RUN, *declared, *reach]) == 0
        assert run_program(["audit", RUN, *reach]) == (3 if options else 0)
