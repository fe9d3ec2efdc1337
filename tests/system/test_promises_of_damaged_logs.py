"""The promises of a run whose log was damaged or forged, or whose archive is not begun: real processes, a real server.

See `tests.support.rig`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import CheckpointStored, Exclusion, LineageStarted, Message, PolicyPublished, StepTrained, encode
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from tests.support.rig import STEPS, TRAIN, S, Site, ended, site

pytestmark = [pytest.mark.timeout(200), pytest.mark.integration]

SHORT = "6"
OWN = "own_advantage"


def flip_newest(place: Site) -> None:
    """One bit of the newest entry of the training, as a bad disk would."""
    blocks = sorted(place.store.rglob("*.blk"), key=lambda path: path.stat().st_mtime_ns)
    found = [(path, path.read_bytes().rfind(TRAIN.encode())) for path in blocks]
    path, position = next((path, at) for path, at in reversed(found) if at >= 0)
    changed = bytearray(path.read_bytes())
    changed[position + len(TRAIN) + 40] ^= 1
    path.write_bytes(changed)


async def test_a_block_that_was_flipped_is_no_other_learner_and_up_ends_well_only_at_its_last_step(tmp_path: Path) -> None:
    # An episode whose observation was lost waits for as long as an Action may take.
    async with site(tmp_path, LIMITS_ACTION="15") as place:
        async with place.up() as process:
            await place.until_checkpoint(6)
            await place.server.kill()
            flip_newest(place)
            await place.server.restart()
            status = await ended(process, 150)
        said = place.output.read_text()
        assert "another worker has taken over" not in place.learner_log + said
        assert "unhandled errors in a TaskGroup" not in place.learner_log + said
        if status == 0:
            assert (await place.entries(StepTrained))[-1].step == STEPS
        else:
            assert "restart-from" in said or "lost" in said, said


async def test_an_archive_that_no_recorder_has_begun_ends_no_worker(tmp_path: Path) -> None:
    async with site(tmp_path, LEARNER_ARCHIVE=str(tmp_path / "archive")) as place:
        async with place.up() as process:
            await place.until_checkpoint(2)
            process.send_signal(signal.SIGINT)
            await ended(process)
        async with place.up("--steps", SHORT) as process:  # the second learner looks for what its checkpoint needs
            assert await ended(process) == 0, place.output.read_text()
        assert "Traceback" not in place.learner_log
        assert (await place.entries(LineageStarted))[-1].parent_step >= 2


Forge = Callable[[Message], Message]


def other_rewards(message: Message) -> Message:
    if isinstance(message, StepTrained):
        return msgspec.structs.replace(message, rewards=dict.fromkeys(message.episodes, 1.0))
    return message


def trained_told_as_stale(message: Message) -> Message:
    if isinstance(message, StepTrained) and message.step == 3:
        told = tuple(Exclusion(episode_id=episode, reason="stale") for episode in message.episodes[:2])
        return msgspec.structs.replace(message, episodes=message.episodes[2:], digests=message.digests[2:], excluded=told)
    return message


def version_elsewhere(message: Message) -> Message:
    if isinstance(message, PolicyPublished) and message.version == 2:
        return msgspec.structs.replace(message, uri="file:///tmp/elsewhere/v2.safetensors")
    return message


def checkpoint_elsewhere(message: Message) -> Message:
    if isinstance(message, CheckpointStored) and message.step == 4:
        return msgspec.structs.replace(message, file="/tmp/elsewhere/l1-000004")
    return message


def own_function(message: Message) -> Message:
    if isinstance(message, LineageStarted) and message.settings:
        algorithm = message.settings.get("algorithm", {}) | {"advantage": f"{OWN}:compute"}
        return msgspec.structs.replace(message, settings=message.settings | {"algorithm": algorithm})
    return message


async def store_forged(place: Site, entries: list[StreamEntry], forge: Forge) -> None:
    """The log again, at the same positions, as somebody with an admin's key would write it."""
    assert isinstance(place.bus, NatsBus)
    await place.bus._connection.api.ask(f"STREAM.DELETE.{place.bus._log}")
    await place.bus.declare(plan_run("default", lanes=1))
    for entry in entries:
        kind = entry.subject.split(".")[2]
        message = decode_any(STORED[kind], entry.payload, subject=entry.subject)
        ack = await place.bus.publish(entry.subject, encode(forge(message)))
        assert ack.sequence == entry.sequence


async def train_shortly(place: Site) -> list[StreamEntry]:
    async with place.up("--steps", SHORT) as process:
        assert await ended(process) == 0, place.output.read_text()
    return [entry async for entry in place.bus.scan([S.log])]


async def test_what_was_forged_in_a_log_is_named_by_the_audit_of_its_server(tmp_path: Path) -> None:
    kinds = {
        other_rewards: "reward_unjudged",
        trained_told_as_stale: "exclusion_unfounded",
        version_elsewhere: "version_elsewhere",
        checkpoint_elsewhere: "checkpoint_elsewhere",
    }
    async with site(tmp_path) as place:
        entries = await train_shortly(place)
        for forge, kind in kinds.items():
            await store_forged(place, entries, forge)
            code, audited = await place.command("audit", "default", "--json")
            assert code == 1 and kind in {each["kind"] for each in json.loads(audited)["findings"]}, audited


async def test_an_audit_of_a_recording_runs_no_module_of_the_current_folder_unless_it_is_named(tmp_path: Path) -> None:
    """The recording names one, and a file of that name lies where the command is run."""
    (tmp_path / f"{OWN}.py").write_text("import pathlib\npathlib.Path('imported').touch()\ncompute = None\n")
    async with site(tmp_path) as place:
        await store_forged(place, await train_shortly(place), own_function)
        await place.command("record", "default", "-o", "forged.fbrec")
        code, audited = await place.command("audit", "forged.fbrec", "--deep")
        assert code == 2 and f"'{OWN}:compute', which is code: name it with --advantage" in audited, audited
        assert not await anyio.Path(tmp_path / "imported").exists()
        await place.command("audit", "forged.fbrec", "--deep", "--advantage", f"{OWN}:compute")
        assert await anyio.Path(tmp_path / "imported").exists()
