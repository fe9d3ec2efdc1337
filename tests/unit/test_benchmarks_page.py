"""The output of all benchmarks becomes one file and one page, also where one of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.all import SUITE, read_rows, run, write_page
from benchmarks.load_plan import compute_distribution
from benchmarks.plots import PLOTS, draw_plots


def test_one_object_or_one_per_line_are_rows_and_other_lines_are_not() -> None:
    assert read_rows('{"a": 1}') == [{"a": 1}]
    assert read_rows('starting\n{"a": 1}\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]
    assert read_rows('{\n "a": 1\n}\n') == [{"a": 1}]
    assert read_rows("nothing") == []


def test_a_benchmark_that_fails_is_told_with_its_last_words() -> None:
    found = run("no_such_benchmark")
    assert found["code"] != 0
    assert "no_such_benchmark" in found["error"]
    assert found["rows"] == []


def test_a_page_has_a_column_for_each_plain_field_within_objects_too_and_names_what_failed() -> None:
    machine = {"commit": "abc", "at": "today", "cores": 2, "machine": "x86_64", "python": "3.11"}
    loop = {"command": "python loop.py", "seconds": 1.0, "load": 0.5, "code": 0, "error": ""}
    rows = [{"sessions": 1, "rate": 10.0, "by": {"nats": 1}}, {"sessions": 64, "ratio": 0.5}]
    broken = {"command": "python broken.py", "seconds": 1.0, "load": 0.5, "code": 3, "error": "first\nlast", "rows": []}
    page = write_page({"machine": machine, "benchmarks": {"loop": loop | {"rows": rows}, "broken": broken}})
    assert "| sessions | rate | by nats | ratio |\n|---|---|---|---|\n| 1 | 10.0 | 1 |  |\n| 64 |  |  | 0.5 |" in page
    assert "exit code 3: last" in page


def test_a_single_object_is_a_table_of_its_fields() -> None:
    chaos = {"command": "python chaos.py", "seconds": 1.0, "load": 0.5, "code": 0, "error": ""}
    row = {"episodes": 3, "recovery": {"server": {"p50": 0.123456, "p99": None}}, "faults": ["kill"]}
    machine = {"commit": "abc", "at": "today", "cores": 2, "machine": "x86_64", "python": "3.11"}
    page = write_page({"machine": machine, "benchmarks": {"chaos": chaos | {"rows": [row]}}})
    table = "| field | value |\n|---|---|\n| episodes | 3 |\n| recovery server p50 | 0.1235 |\n| recovery server p99 | None |\n"
    assert table in page
    assert "kill" not in page


@pytest.mark.integration
def test_each_plot_is_drawn_from_rows_as_its_benchmark_prints_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recovered = {"p50": 1.0, "p99": 2.0}
    rows = {
        "step_loop": {"sessions": 64, "steps_per_second": 5.0, "bare_steps_per_second": 9.0,
                      "latency_ms_by_percentile": compute_distribution([0.001, 0.002, 0.005])},
        "scaling": {"processes": 2, "steps_per_second": 300.0, "ideal": 320.0},
        "chaos": {"recovery_seconds": dict.fromkeys(("environment", "inference", "learner"), recovered)
                  | {"server": {"p50": None, "p99": None}}},
        "async_against_sync": {"staleness": 0, "episodes_per_second": 9.0, "possible": 10.0},
    }  # fmt: skip
    results = {"benchmarks": {name: {"rows": [row]} for name, row in rows.items()}}
    drawn = draw_plots(results, tmp_path / "plots")
    assert {file.stem for file in drawn.values()} == set(PLOTS)
    assert all("</svg>" in file.read_text() for file in drawn.values())
    assert draw_plots({"benchmarks": {}}, tmp_path / "none") == {}


def test_every_plot_belongs_to_a_benchmark_of_the_suite() -> None:
    assert {benchmark for benchmark, _, _ in PLOTS.values()} <= {name for name, *_ in SUITE}
