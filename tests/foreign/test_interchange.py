"""A thousand episodes as ATIF and as a log of Inspect, read by harbor's own model and by Inspect, and compared with the log.

`just test-foreign`; HARBOR_PYTHON and INSPECT_PYTHON name the interpreters that have them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fleetbus_workers.cli.program import run_program
from tests.support.interchange_run import ExchangeRun, list_answers, play_kinds, write_run

ROOT = Path(__file__).parents[2]
HARBOR = os.environ.get("HARBOR_PYTHON", str(ROOT / ".venv-harbor/bin/python"))
INSPECT = os.environ.get("INSPECT_PYTHON", str(ROOT / ".venv-inspect/bin/python"))
RECORDING = os.environ.get("INTERCHANGE_RECORDING", "")
ROUNDS = int(os.environ.get("INTERCHANGE_ROUNDS", "200"))
"""Each plays one episode of every kind: six."""

READ_LOG = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
for sample in log.samples:
    for message in sample.messages:
        own = (message.metadata or {}).get("fleetbus", {})
        if message.role == "assistant" and "turn" in own:
            print(json.dumps([sample.uuid, own["turn"], own["completion_token_ids"], own["logprobs"]]))
calls = [event for sample in log.samples for event in sample.events if event.event == "model"]
assert all(event.input and event.output.choices[0].message.text is not None for event in calls)
print(json.dumps([log.status, len(log.samples), len(calls)]))
"""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if RECORDING:
        return Path(RECORDING)
    run = ExchangeRun()
    for number in range(ROUNDS):
        play_kinds(run, suffix=f"-{number}")
    return write_run(tmp_path_factory.mktemp("interchange") / "run.fbrec", run)


def read_lines(python: str, *arguments: str) -> list[Any]:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_harbors_model_validates_all_and_ids_are_those_of_the_log(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    assert run_program(["episodes", str(recording), "--format", "atif", "--output", str(file)]) == 0
    lines = read_lines(HARBOR, str(Path(__file__).parent / "harbor_trajectories.py"), str(file))
    valid = [line for line in lines if len(line) == 3]
    found = {(line[0], line[1]): (line[2], line[3], line[4]) for line in lines if len(line) == 5}
    expected = list_answers(recording)
    different = [key for key, answer in expected.items() if found.get(key) != answer]
    tokens = sum(len(prompt) + len(sampled) for prompt, sampled, _ in expected.values())
    print(f"{len(valid)} trajectories valid, {len(expected)} answers, {tokens} ids: {len(different)} differ")
    assert len(valid) == len(file.read_bytes().splitlines()) and not different


def test_inspect_reads_the_log_and_ids_are_those_of_the_log(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.eval"
    assert run_program(["episodes", str(recording), "--format", "eval", "--output", str(file)]) == 0
    *lines, (status, samples, calls) = read_lines(INSPECT, "-c", READ_LOG, str(file))
    found = {(line[0], line[1]): (line[2], line[3]) for line in lines}
    expected = list_answers(recording)
    different = [key for key, (_, sampled, logprobs) in expected.items() if found.get(key) != (sampled, logprobs)]
    print(f"{samples} samples, {len(expected)} answers, {calls} calls of the model: {len(different)} differ")
    assert status == "success" and calls == len(lines) and not different
    assert run_program(["import", str(file), "-o", str(tmp_path / "back.fbrec")]) == 0
    assert list_answers(tmp_path / "back.fbrec") == expected
