"""TRL's `GRPOTrainer` trains on a run of real processes whose environment workers are killed: `just test-trl`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import anyio
import pytest

pytest.importorskip("trl")

from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Subjects
from tests.support.backends import asyncio_alone
from tests.support.servers import connect
from tests.support.trl_deployment import ROOT, STARTER, deployed

anyio_backend = asyncio_alone

SCRIPT = ROOT / "tests/trainers/train_with_grpo.py"
STEPS = 5
ENTRIES_PER_KILL = 12
"""Claims and results of episodes: a step has eight of each, so that kills come in the middle of it, however fast they are."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


async def test_grpo_trainer_samples_each_step_from_its_own_weights_while_environment_workers_are_killed(tmp_path: Path) -> None:
    kills = 0
    async with deployed(tmp_path) as deployment:

        async def kill_environment_workers() -> None:
            nonlocal kills
            indexes, entries = itertools.cycle((0, 2)), 0
            async with (
                connect(deployment.url, run="trl", role="operator") as bus,
                bus.read([Subjects("trl").episodes], start=(await bus.log_state()).last_sequence + 1) as reader,
            ):
                while True:
                    await reader.receive()
                    entries += 1
                    if entries % ENTRIES_PER_KILL == 0:
                        deployment.replace(next(indexes))
                        kills += 1

        trainer = deployment.spawn([sys.executable, str(SCRIPT), str(STARTER), "out", str(STEPS)], "trl")
        await deployment.wait_for_step(1, trainer)
        async with anyio.create_task_group() as group:
            group.start_soon(kill_environment_workers)
            await deployment.wait_for_end(trainer)
            group.cancel_scope.cancel()
        audit = json.loads(await deployment.call("audit", "trl", "--deep", "--json"))
        versions = await read_versions(deployment.url)
    lines = deployment.read_trained()
    history = json.loads((tmp_path / "out/history.json").read_text())
    print({"kills": kills, "steps": len(history), "excluded": lines[-1]["excluded"]}, history[-1], audit["books"], versions)
    assert kills >= 2
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(len(line["rewards"]) == 8 for line in lines)
    assert audit["balanced"], audit
    assert versions == {(version,) for version in range(STEPS)}, "no episode was answered by two versions, nor by an old one"


async def read_versions(url: str) -> set[tuple[int, ...]]:
    """The versions that finished episodes were sampled from."""
    async with connect(url, run="trl", role="operator") as bus:
        entries = [decode_episode_entry(entry) for entry in await bus.history([Subjects("trl").episodes])]
    return {entry.policy_versions for entry in entries if isinstance(entry, EpisodeFinished) and entry.reward is not None}
