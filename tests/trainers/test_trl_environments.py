"""The example of docs/trainers.md for TRL's ``environment_factory`` trains while environment workers are killed.

`just test-trl`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL lives in an environment of its own: `just test-trl`", allow_module_level=True)

from fleetbus.tasks.files import dump_tasks
from fleetbus_schemas import SessionClaimed, SessionEnded, SessionRecorded, Subjects
from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks
from fleetbus_workers.environment.stepwise.journal_log import decode_journal_entry
from tests.gateway.test_trainers_page import shown
from tests.support.backends import asyncio_alone
from tests.support.servers import connect
from tests.support.trl_deployment import ROOT, STARTER, Deployment, deployed

anyio_backend = asyncio_alone

SCRIPT = ROOT / "tests/trainers/train_with_environments.py"
STEPS, ROWS = 5, 8
RECORDS_PER_KILL = 18
"""Calls of sessions: a step has about fifty of them, so that kills come in the middle of it, however fast they are."""

SUBJECTS = Subjects("trl")
JOURNALS = [SUBJECTS.session("*")]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


async def test_grpo_trainer_plays_each_episode_once_while_environment_workers_are_killed(tmp_path: Path) -> None:
    kills: list[int] = []
    tasks = tmp_path / "tasks.json"
    dump_tasks(build_train_tasks(16, seed=0), tasks)
    async with deployed(tmp_path, roles=("environment", "environment")) as deployment:
        example = tmp_path / "example.py"
        example.write_text(read_example(deployment.url, tasks))
        command = [sys.executable, str(SCRIPT), str(STARTER), "out", str(STEPS), str(example)]
        trainer = deployment.spawn(command, "trl")
        await deployment.wait_for_step(1, trainer)
        async with anyio.create_task_group() as group:
            group.start_soon(kill_environment_workers, deployment, kills)
            await deployment.wait_for_end(trainer)
            group.cancel_scope.cancel()
        audit = json.loads(await deployment.call("audit", "trl", "--deep", "--json"))
        journals = await read_journals(deployment.url)
    lines = deployment.read_trained()
    trained = [reward for line in lines for reward in line["rewards"]]
    verified: list[float] = []
    taken_over = 0
    for entries in journals.values():
        calls = [entry.call for entry in entries if isinstance(entry, SessionRecorded)]
        assert len(calls) == len({call.key for call in calls}), "a call was executed twice"
        answers = [entry.answer for entry in entries if isinstance(entry, SessionRecorded) and entry.call.call == "verify"]
        verified += [answer.reward for answer in answers if answer.reward is not None]
        taken_over += sum(isinstance(entry, SessionClaimed) for entry in entries) > 1
        assert [entry.end for entry in entries if isinstance(entry, SessionEnded)] == ["closed"]
    facts = {"kills": len(kills), "taken_over": taken_over, "episodes": len(trained), "sessions": len(journals)}
    print(facts, lines[-1], Counter(trained))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(len(line["rewards"]) == ROWS for line in lines)
    assert lines[-1]["excluded"] == 0
    assert len(journals) == len(trained) + 1, "an episode each, and one that told of the tools"
    assert sorted(verified) == sorted(trained)
    assert audit["balanced"], audit
    assert len(kills) >= 4
    assert taken_over >= 1
    assert sum(line["calls"] for line in lines) > len(trained), "the policy calls tools"


def read_example(url: str, tasks: Path) -> str:
    """The example of docs/trainers.md on this run, with the starter's policy."""
    example = shown("environment_factory=")
    for told, meant in {
        'url="nats://host:4222", run="r1", tasks="tasks.json"': f'url="{url}", run="trl", tasks="{tasks}", timeout=900.0',
        '"Qwen/Qwen3-0.6B"': f'"{STARTER}"',
    }.items():
        assert told in example
        example = example.replace(told, meant)
    return example


async def kill_environment_workers(deployment: Deployment, kills: list[int]) -> None:
    async with (
        connect(deployment.url, run="trl", role="operator") as bus,
        bus.read(JOURNALS, start=(await bus.log_state()).last_sequence + 1) as reader,
    ):
        indexes = itertools.cycle((0, 1))
        while True:
            for _ in range(RECORDS_PER_KILL):
                await reader.receive()
            kills.append(next(indexes))
            deployment.replace(kills[-1])


async def read_journals(url: str) -> dict[str, list[object]]:
    """The entries of each session, in their order."""
    journals: dict[str, list[object]] = {}
    async with connect(url, run="trl", role="operator") as bus:
        for entry in await bus.history(JOURNALS):
            journals.setdefault(entry.subject, []).append(decode_journal_entry(entry))
    return journals
