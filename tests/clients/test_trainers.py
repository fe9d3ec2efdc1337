"""Other trainers' own loops play on while environment workers are killed and connections cut: each row is whole, and no step
of it was lost or executed twice. Opt-in (`just test-trainers`): the trainers live in an environment of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.clients.test_kills import EPISODES, MIN_FAULTS, STEP_SECONDS, STEPS, Faults, faulty_run, find_python, play
from tests.support.counting_environment import REWARD
from tests.support.gateway_processes import SUBJECTS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("trainer", "interpreter"),
    [
        *((trainer, "trainers") for trainer in ("verl", "tinker_cookbook", "openrlhf", "ms_swift", "art", "prime_rl")),
        ("skyrl_generator", "skyrl_generator"),
    ],
)
async def test_a_trainer_s_rows_are_whole_and_no_step_is_lost_or_doubled(
    tmp_path: Path, record_property: Any, trainer: str, interpreter: str
) -> None:
    python = find_python(interpreter)
    tasks = tmp_path / "tasks.json"
    config = {"steps": STEPS, "seconds": STEP_SECONDS}
    tasks.write_text(json.dumps([{"key": "t", "prompt": "Count.", "env_key": "x", "config": config}]))
    async with faulty_run(tmp_path / "server", "") as (faults, url):
        facts = {"url": url, "tasks": str(tasks), "folder": str(tmp_path)}
        rows = await play(python, f"play_{trainer}.py", facts, faults)
        await check_rows(rows, faults, record_property)


async def check_rows(rows: list[dict[str, Any]], faults: Faults, record_property: Any) -> None:
    assert len(rows) >= EPISODES
    for row in rows:
        assert row["sampled"] == [f"step {number}" for number in range(1, STEPS + 1)]
        assert len(row["observed"]) == STEPS - 1
        assert all(f"{number}: step {number}" in text for number, text in enumerate(row["observed"], 1))
        assert row["reward"] == STEPS * REWARD
    bus, whole = faults._fleet.bus, 0
    for subject in await bus.list_subjects(SUBJECTS.session("*")):
        journal = await read_session_journal(bus, SUBJECTS, subject.rpartition(".")[2])
        steps = [record.call.text for record in journal.records if record.call.call == "step"]
        assert len(steps) == len({*steps}), "a step was executed twice"
        whole += len(steps) == STEPS
    assert whole >= len(rows)
    facts = {"rows": len(rows), "steps": len(rows) * STEPS, **Counter(faults.done)}
    print(json.dumps(facts))
    for name, value in facts.items():
        record_property(name, value)
    assert len(faults.done) >= MIN_FAULTS
