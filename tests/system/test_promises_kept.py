"""The promises of a run when its log is cut, purged or restored, kept by real processes and a real server.

See `tests.support.rig`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.bus.nats.bus import NatsBus
from fleetbus_schemas import LineageStarted, StepTrained
from fleetbus_workers.learner.checkpoints import INDEX
from tests.support.rig import STEPS, S, Site, ended, site

pytestmark = [pytest.mark.timeout(200), pytest.mark.integration]


def check_endings(site: Site) -> None:
    """A learner whose log lost entries says so, and never that another took over, or that a task group met errors."""
    assert "the log lost entries" in site.learner_log
    assert "another worker has taken over" not in site.learner_log
    assert "unhandled errors in a TaskGroup" not in site.learner_log


@pytest.mark.parametrize("kind", ["train", "policy"])
async def test_a_learner_whose_subject_was_purged_begins_anew_from_its_checkpoint_and_up_trains_to_the_end(
    kind: str, tmp_path: Path
) -> None:
    async with site(tmp_path) as place:
        async with place.up() as process:
            await place.until_checkpoint(6)
            await place.bus.purge(getattr(S, kind)("default"), below=1 << 40)
            assert await ended(process) == 0, (tmp_path / "up.out").read_text()
        check_endings(place)
        steps = await place.entries(StepTrained)
        lineages = await place.entries(LineageStarted)
        assert steps[-1].step == STEPS
        assert [started.lineage for started in lineages][-1] == "l2"
        assert lineages[-1].parent_step >= 4


@pytest.mark.slow  # two minutes of waits
@pytest.mark.timeout(400)
async def test_a_learner_whose_log_lost_its_tail_was_not_replaced_and_up_trains_to_the_end(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        async with place.up() as process:
            await place.until_checkpoint(6)
            copy = await place.copy_store()
            reached = len(await place.entries(StepTrained))
            while len(await place.entries(StepTrained)) < reached + 2:  # noqa: ASYNC110  # other processes train
                await anyio.sleep(0.05)
            await place.put_back(copy)
            # 42 to 120 s on two cores at rest: episodes whose histories were lost are played anew after waits of `limits.late`
            assert await ended(process, 270) == 0, (tmp_path / "up.out").read_text()
        assert "another worker has taken over" not in place.learner_log
        assert "unhandled errors in a TaskGroup" not in place.learner_log
        assert (await place.entries(StepTrained))[-1].step == STEPS


async def test_after_a_log_went_back_behind_all_that_it_names_a_person_goes_on_from_any_whole_checkpoint(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as place:
        async with place.up() as process:
            await place.until_checkpoint(2)
            copy = await place.copy_store()
            await place.until_checkpoint(10)
            process.send_signal(signal.SIGINT)
            await ended(process)
        whole = sorted(int(path.name[3:]) for path in (place.run_folder / "checkpoints").iterdir())
        assert len(whole) == 2 and whole[0] >= 8
        await place.put_back(copy)
        async with place.up() as process:
            assert await ended(process) != 0
        said = (tmp_path / "up.out").read_text()
        assert f"--restart-from {whole[1]} | {whole[0]} | start" in said
        code, audited = await place.command("audit", "default")
        assert code == 1 and "NOT BALANCED checkpoints_ahead" in audited
        async with place.up("--restart-from", str(whole[0])) as process:
            assert await ended(process) == 0, (tmp_path / "up.out").read_text()
        started = (await place.entries(LineageStarted))[-1]
        assert (started.parent, started.parent_step, started.restart) == ("l1", whole[0], str(whole[0]))
        code, audited = await place.command("audit", "default", "--json")
        findings = {each["kind"]: each["ids"] for each in json.loads(audited)["findings"]}
        assert code == 1 and list(findings) == ["steps_lost"]


@pytest.mark.parametrize("change", [-600, 400, 10**9])
async def test_a_checkpoint_whose_index_was_altered_is_passed_over_and_the_books_balance(change: int, tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        async with place.up() as process:
            await place.until_checkpoint(6)
            process.send_signal(signal.SIGINT)
            await ended(process)
        older, newest = sorted((place.run_folder / "checkpoints").iterdir())
        altered = msgspec.json.decode((newest / INDEX).read_bytes())
        (newest / INDEX).write_bytes(msgspec.json.encode(altered | {"floor": altered["floor"] + change}))
        async with place.up() as process:
            assert await ended(process) == 0, (tmp_path / "up.out").read_text()
        assert (await place.entries(LineageStarted))[-1].parent_step == int(older.name[3:])
        code, audited = await place.command("audit", "default", "--deep")
        assert code == 0, audited


async def test_a_log_that_was_purged_aged_out_or_cut_does_not_balance_and_is_no_whole_recording(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        async with place.up("--steps", "6") as process:
            assert await ended(process) == 0, (tmp_path / "up.out").read_text()
        code, audited = await place.command("audit", "default", "--deep")
        assert code == 0 and "the audit balances" in audited and "not proven: that environments and judges" in audited
        code, recorded = await place.command("record", "default", "-o", "whole.fbrec")
        assert code == 0, recorded
        code, recorded = await place.command("audit", "whole.fbrec", "--deep")
        assert code == 0, recorded

        end = (await place.bus.log_state()).last_sequence
        await place.change_stream(max_age=3600 * 10**9)
        code, audited = await place.command("audit", "default")
        assert code == 1 and "NOT BALANCED log_erases" in audited and "max_age 3600" in audited
        async with place.up("--steps", "8") as process:
            assert await ended(process) == 2
        assert "max_age" in (tmp_path / "up.out").read_text()
        await place.change_stream(max_age=0)

        assert isinstance(place.bus, NatsBus)
        api, log = place.bus._connection.api, place.bus._log
        for sequence in range(end - 59, end + 1):
            await api.ask(f"STREAM.MSG.DELETE.{log}", {"seq": sequence, "no_erase": True})
        code, audited = await place.command("audit", "default", "--json")
        assert code == 1 and json.loads(audited)["findings"][0]["ids"][-1] == f"{end - 59}-{end}"
        code, recorded = await place.command("record", "default", "-o", "cut.fbrec")
        assert code == 1 and "it lost its end" in recorded

        await place.bus.purge(S.log, below=1 << 40)
        for deep in ((), ("--deep",)):
            code, audited = await place.command("audit", "default", *deep)
            assert code == 1 and "NOT BALANCED nothing_read" in audited and f"1-{end}" in audited
        code, recorded = await place.command("record", "default", "-o", "empty.fbrec")
        assert code == 1 and "nothing was read" in recorded
