"""What all benchmarks print becomes one file and one page, also where one of them fails."""

from __future__ import annotations

from benchmarks.all import read_rows, run, write_page


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


def test_a_page_has_a_column_for_each_plain_field_and_names_what_failed() -> None:
    machine = {"commit": "abc", "at": "today", "cores": 2, "machine": "x86_64", "python": "3.11"}
    loop = {"command": "python loop.py", "seconds": 1.0, "load": 0.5, "code": 0, "error": ""}
    rows = [{"sessions": 1, "rate": 10.0, "by": {"nats": 1}}, {"sessions": 64, "ratio": 0.5}]
    broken = {"command": "python broken.py", "seconds": 1.0, "load": 0.5, "code": 3, "error": "first\nlast", "rows": []}
    page = write_page({"machine": machine, "benchmarks": {"loop": loop | {"rows": rows}, "broken": broken}})
    assert "| sessions | rate | ratio |\n|---|---|---|\n| 1 | 10.0 |  |\n| 64 |  | 0.5 |" in page
    assert "exit code 3: last" in page
