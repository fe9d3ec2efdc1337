"""Sinks of metrics: JSON lines, TensorBoard and W&B have the same numbers, and Prometheus those of the last step.

TensorBoard and W&B are the real packages; without them their tests are skipped: `just test-sinks`.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import EvaluationFinished, LineageStarted, Message, StepTrained, Subjects, encode
from fleetbus_workers.observe.metrics.collect import collect, iterate_evaluation_values, iterate_step_values
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.sinks.base import group_names
from fleetbus_workers.observe.sinks.table import open_sinks

SUBJECTS = Subjects("r")
METRICS = {
    "reward": 1 / 3,
    "loss": -0.125,
    "seconds_wait": 3.0,
    "seconds_train": 1e-7,
    "staleness_max": 2.0,
    "kl": float("nan"),
}


def fold(*happened: Message) -> RunState:
    from fleetbus.bus.base import StreamEntry

    state = RunState(steps=9)
    for sequence, message in enumerate(happened, start=1):
        subject, time_ns = SUBJECTS.train("default"), 1_700_000_000_000_000_000 + sequence * 1_500_000_000
        entry = StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=time_ns)
        state.apply(entry, message, 0.0, time_ns)
    return state


def step(number: int, lineage: str = "a") -> StepTrained:
    metrics = {name: value * number for name, value in METRICS.items()}
    return StepTrained(lineage=lineage, step=number, version=number, episodes=("e",), metrics=metrics)


STATE = fold(LineageStarted(lineage="a", worker="l"), step(1), step(2), step(3))
RESUMED = fold(
    LineageStarted(lineage="a", worker="l"),
    *(step(number) for number in (1, 2, 3)),
    LineageStarted(lineage="b", worker="l", parent="a", parent_step=1),
    step(2, "b"),
)


CONFIGURATION = {"learner.steps": 9, "run.name": "r"}


def exported(state: RunState, **where: Any) -> None:
    with open_sinks(run="r", configuration=CONFIGURATION, **where) as sinks:
        for each in iterate_evaluation_values(state, set()):
            sinks.write(*each)
        for number, seconds, values in iterate_step_values(state, set()):
            sinks.write(number, seconds, values)


def expected(state: RunState) -> list[dict[str, float]]:
    return [{"step": number, "time": seconds, **values} for number, seconds, values in iterate_step_values(state, set())]


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluated(name: str, success: float, graded: int = 4) -> EvaluationFinished:
    return EvaluationFinished(
        lineage="a",
        step=0,
        version=0,
        name=name,
        episodes=4,
        graded=graded,
        success=success,
        mean_reward=success,
        temperature=0.0 if name.endswith("greedy") else 1.0,
    )


def test_names_are_grouped() -> None:
    grouped = group_names({"reward": 0.5, "seconds_wait": 1.0, "staleness_max": 2.0, "version": 3.0})
    assert set(grouped) == {"train/reward", "time/wait", "staleness/max", "train/version"}
    assert group_names({"success": 1.0}, "end") == {"eval/success": 1.0}
    assert group_names({"success": 1.0}, "end_greedy") == {"eval_greedy/success": 1.0}


def test_held_out_results_are_rows_and_one_without_a_grade_is_none(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    state = fold(LineageStarted(lineage="a", worker="l"), evaluated("start", 0.25), evaluated("step0", 0.0, graded=0))
    exported(state, jsonl=file)
    exported(state, jsonl=file)
    (row,) = lines(file)
    assert (row["evaluation"], row["success"], row["graded"], row["step"]) == ("start", 0.25, 4, 0) and row["time"] > 1e9


def test_json_lines_have_the_numbers_that_prometheus_has(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    exported(STATE, jsonl=file)
    assert lines(file) == expected(STATE) and len(lines(file)) == 3
    last = lines(file)[-1]
    assert last["reward"] == METRICS["reward"] * 3 and "kl" not in last
    samples = {
        (sample.name, *sample.labels): sample.value
        for sample in collect(RunView(STATE, LogHealth(), ServerView(), [], now=0.0, now_ns=1))
    }
    assert samples["fleetbus_train_metric", "reward"] == last["reward"]
    assert samples["fleetbus_train_metric", "loss"] == last["loss"]
    assert samples["fleetbus_stage_seconds", "train"] == last["seconds_train"]
    assert samples["fleetbus_staleness_steps", "max"] == last["staleness_max"]
    assert samples["fleetbus_step",] == last["step"] and samples["fleetbus_policy_version",] == last["version"]


def test_an_exporter_that_is_started_again_goes_on_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    exported(fold(LineageStarted(lineage="a", worker="l"), step(1), step(2)), jsonl=file)
    with file.open("ab") as torn:
        torn.write(b'{"step": 3, "ti')
    exported(STATE, jsonl=file)
    exported(STATE, jsonl=file)
    assert lines(file) == expected(STATE)


def test_a_step_that_a_later_lineage_trains_again_is_written_again(tmp_path: Path) -> None:
    file, written = tmp_path / "metrics.jsonl", set[tuple[str, int]]()
    with open_sinks(run="r", jsonl=file) as sinks:
        for state in (STATE, RESUMED):
            for number, seconds, values in iterate_step_values(state, written):
                sinks.write(number, seconds, values)
    assert [line["step"] for line in lines(file)] == [1, 2, 3, 2]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("do not forget\n")
    with pytest.raises(UserError, match="is not a metrics file"):
        exported(STATE, jsonl=file)
    assert file.read_text() == "do not forget\n"


@pytest.mark.parametrize(
    ("sink", "package"), [("tensorboard", "tensorboard"), *((name, name) for name in ("wandb", "mlflow", "trackio"))]
)
def test_a_package_that_is_missing_is_named(sink: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.summary", None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        exported(STATE, **{sink: tmp_path / "x" if sink == "tensorboard" else "project"})


def test_tensorboard_has_them_as_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    exported(STATE, tensorboard=tmp_path)
    found = EventAccumulator(str(tmp_path)).Reload()
    wanted = [each | group_names(each) for each in expected(STATE)]
    names = set(group_names(expected(STATE)[-1])) - {"train/step", "train/time"}
    assert set(found.Tags()["tensors"]) == names | {"configuration"}
    assert b"| learner.steps | 9 |" in found.Tensors("configuration")[0].tensor_proto.string_val[0]
    for name in names:
        assert found.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
        events = found.Tensors(name)
        assert [(event.step, event.wall_time) for event in events] == [(each["step"], each["time"]) for each in wanted]
        kept = [float(make_ndarray(event.tensor_proto)) for event in events]
        assert kept == [as_32_bits(each[name]) for each in wanted]
    assert "torch" not in sys.modules or "torch.utils.tensorboard" not in sys.modules


def as_32_bits(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(180)
def test_wandb_has_them_in_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    exported(RESUMED, wandb="a-project", jsonl=tmp_path / "metrics.jsonl")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records: list[Any] = []
    ends = time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in records):  # its service writes after `finish`
        assert time.monotonic() < ends
        time.sleep(0.1)
        records = [wandb_internal_pb2.Record.FromString(record) for record in leveldb_records(file.read_bytes()[7:])]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name) == ("a-project", "r")
    history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    kept = [{(item.key or item.nested_key[0]): json.loads(item.value_json) for item in each.item} for each in history]
    numbers = [{name.rpartition("/")[2]: value for name, value in each.items() if not name.startswith("_")} for each in kept]
    assert all(set(group_names({"loss": 0.0})) <= set(each) for each in kept), "grouped names"
    grouped = [
        {name.removeprefix("seconds_").removeprefix("staleness_"): each[name] for name in each} for each in expected(RESUMED)
    ]
    assert numbers == grouped and lines(tmp_path / "metrics.jsonl") == expected(RESUMED)
    settings = {item.key: json.loads(item.value_json) for record in records for item in record.config.update}
    settings |= {item.key: json.loads(item.value_json) for record in records for item in record.run.config.update}
    assert settings["learner.steps"] == 9
    assert [each["step"] for each in numbers] == [1, 2]
    assert not [record for record in records if record.WhichOneof("record_type") in ("stats", "output_raw")]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log (github.com/google/leveldb/blob/main/doc/log_format.md), whose blocks are 32 KiB."""
    position, begun, header = 0, b"", 7
    while position + header <= len(content):
        left = 32_768 - (position + header) % 32_768  # the file's own header counts to the first block
        if left < header:
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        begun += content[position + 7 : position + 7 + length]
        position += header + length
        if kind in (1, 4):
            yield begun
            begun = b""


def test_wandb_without_an_account_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = "from fleetbus_workers.observe.sinks.table import open_sinks\nopen_sinks(run='r', wandb='p').__enter__()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "WANDB_API_KEY": "short", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False)
    (complaint,) = [line for line in ended.stderr.splitlines() if line.startswith("fleetbus.errors.UserError")]
    assert "Weights & Biases cannot be reached: WANDB_API_KEY invalid" in complaint and "WANDB_MODE=offline" in complaint
