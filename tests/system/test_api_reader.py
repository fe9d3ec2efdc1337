"""`fleetbus.open_run` and `fleetbus episodes --output`: rows of a recording, as iterators and as tables."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

import fleetbus
from fleetbus_workers.cli.program import run_program

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "replay" / "recordings" / "guessing.fbrec"


@pytest.fixture(scope="module")
def reader() -> fleetbus.RunReader:
    return fleetbus.open_run(RECORDING)


def test_episodes_are_rows_in_the_order_of_their_requests(reader: fleetbus.RunReader) -> None:
    rows = list(reader.episodes())
    assert len(rows) > 10 and {row.outcome for row in rows} >= {"completed"}
    assert [row.sequence for row in rows] == sorted(row.sequence for row in rows)


def test_tokens_align_and_match_what_the_result_counted(reader: fleetbus.RunReader) -> None:
    counted = {row.episode_id: row for row in reader.episodes()}
    rows = list(reader.tokens())
    assert sorted(row.episode_id for row in rows) == sorted(counted)
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert all((version >= 0) == own for version, own in zip(row.versions, row.mask, strict=True))
        assert all(own or logprob == 0.0 for logprob, own in zip(row.logprobs, row.mask, strict=True))
        if row.outcome == "completed":
            assert any(row.mask) and row.reward == counted[row.episode_id].reward
            assert set(row.versions) - {-1} == set(counted[row.episode_id].policy_versions)


def test_transcripts_stream_in_the_order_of_results_and_may_be_left_early(reader: fleetbus.RunReader) -> None:
    transcripts = reader.transcripts()
    first = next(transcripts)
    assert first.result is not None and first.request is not None
    assert first == reader.transcript(first.result.episode_id)
    transcripts.close()  # type: ignore[attr-defined]  # a generator
    results = [transcript.result is not None for transcript in reader.transcripts()]
    assert results == sorted(results, reverse=True)


async def test_a_reader_works_while_the_caller_s_event_loop_runs(reader: fleetbus.RunReader) -> None:
    assert len(list(reader.episodes())) > 10


def test_metrics_are_a_column_each(reader: fleetbus.RunReader) -> None:
    pytest.importorskip("pandas")
    steps = list(reader.metrics())
    frame = reader.to_pandas("metrics")
    assert [*frame["step"]] == [step.step for step in steps] == sorted(step.step for step in steps)
    assert [*frame["reward"]] == [step.metrics["reward"] for step in steps]


def test_rows_are_written_as_csv_and_json_lines(reader: fleetbus.RunReader, tmp_path: Path) -> None:
    count = reader.write(tmp_path / "tokens.jsonl", "tokens")
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert len(lines) == count and lines[0]["ids"] == list(next(reader.tokens()).ids)
    reader.write(tmp_path / "episodes.csv")
    with (tmp_path / "episodes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = next(reader.episodes())
    assert len(rows) == count and rows[0]["episode_id"] == first.episode_id
    assert json.loads(rows[0]["policy_versions"]) == list(first.policy_versions)
    assert json.loads(rows[0]["timings"]) == first.timings


@pytest.mark.parametrize("what", ["episodes", "tokens", "metrics"])
def test_rows_are_the_same_as_parquet_and_arrow(reader: fleetbus.RunReader, tmp_path: Path, what: str) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = reader.to_arrow(what)
    assert reader.write(tmp_path / "rows.parquet", what) == table.num_rows > 0
    written = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert repr(written.to_pylist()) == repr(table.to_pylist())  # as text: NaN, which a metric may be, equals nothing


def test_a_missing_package_is_one_line(reader: fleetbus.RunReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pyarrow", "pandas")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    with pytest.raises(fleetbus.UserError, match=r"^pyarrow is not installed: pip install pyarrow$"):
        reader.write(tmp_path / "rows.parquet")
    with pytest.raises(fleetbus.UserError, match=r"^pandas is not installed: pip install pandas$"):
        reader.to_pandas()
    assert list(tmp_path.iterdir()) == []


class Blocker:
    """An import system without pyarrow and pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("pyarrow", "pandas"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)


def test_what_is_not_there_is_said_in_one_line(reader: fleetbus.RunReader, tmp_path: Path) -> None:
    for make, message in (
        (lambda: fleetbus.open_run("nowhere", folder=tmp_path), "there is no run nowhere in "),
        (lambda: fleetbus.open_run(tmp_path / "gone.fbrec"), "there is no recording "),
        (lambda: fleetbus.open_run("a/b", folder=tmp_path), "run.name 'a/b' must be"),
        (lambda: reader.transcript("gone"), "there is no episode gone in "),
        (lambda: reader.to_pandas("steps"), "unknown table 'steps': choose one of episodes, tokens, metrics"),
        (lambda: reader.write("rows.xlsx"), "cannot write rows.xlsx: its name must end in one of .parquet, .csv, .jsonl"),
        (lambda: reader.write(tmp_path / "no" / "rows.csv"), f"cannot write {tmp_path / 'no' / 'rows.csv'}: No such file"),
    ):
        with pytest.raises(fleetbus.UserError) as error:
            make()  # type: ignore[no-untyped-call]
        assert message in str(error.value)


def test_the_command_writes_the_rows_that_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    assert run_program(["episodes", str(RECORDING), "--outcome", "completed", "--min-reward", "1", "--output", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and {row["outcome"] for row in rows} == {"completed"} and {row["reward"] for row in rows} == {1.0}
    assert f"{len(rows)} of " in capsys.readouterr().out
    assert run_program(["episodes", str(RECORDING), "--output", str(tmp_path / "rows.txt")]) == 2
    assert "must end in one of" in capsys.readouterr().err
    if importlib.util.find_spec("pyarrow") is None:
        assert run_program(["episodes", str(RECORDING), "--output", str(tmp_path / "rows.parquet")]) == 2
        assert "pip install pyarrow" in capsys.readouterr().err


def test_the_command_lists_episodes_by_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["episodes", str(RECORDING), "--text", "WORTH 0", "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "14 of 33 episodes, the last 2 shown" in printed
    assert printed.count("turn 1, user: [[worth]] [[0]]") == 2
    assert run_program(["episodes", str(RECORDING), "--text", "worth 0", "--limit", "2", "--json"]) == 0
    (_, last) = json.loads(capsys.readouterr().out)
    assert last["found"]["parts"] == ["", "worth", " ", "0", ""] and last["found"]["turn"] == 1
    assert run_program(["episodes", str(RECORDING), "--text", "--"]) == 2
    assert "nothing to search for" in capsys.readouterr().err
