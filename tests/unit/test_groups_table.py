"""The table of opt-in groups: what is counted, what is judged, and what stays of rows that did not run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import groups
from tests.groups import Group, Row, count, judge, main, run_group, wait_at_most, write_table

TWO_RUNS = (
    "== python 3.12\n3 passed, 1 skipped in 1.20s\n== python 3.13\n=== 1 failed, 2 passed, 1 error in 61.00s (0:01:01) ===\n"
)


def test_the_outcomes_of_all_runs_of_a_group_are_added() -> None:
    assert count(TWO_RUNS) == Counter(passed=5, skipped=1, failed=1, error=1)


def test_a_group_without_a_test_is_told_from_one_that_failed() -> None:
    assert judge("5 passed in 1.00s\n", 0) == "green"
    assert judge(TWO_RUNS, 1) == "red"
    assert judge("5 passed in 1.00s\n", 1) == "red", "something after the tests failed"
    assert judge("ERROR: no matching distribution | x\n", 1) == "no test ran: ERROR: no matching distribution / x"
    assert judge("ready\n3 skipped in 0.1s\n", 0) == "not possible here: every test was skipped"


def test_a_machine_that_lacks_something_runs_nothing() -> None:
    row = run_group("docker", Group("no-such-recipe", 1, lambda: "no Docker engine runs"))
    assert (row.result, row.seconds) == ("not possible here: no Docker engine runs", 0.0)


def test_all_that_a_group_prints_is_kept_also_when_no_test_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(groups, "OUTPUTS", tmp_path / "outputs")
    row = run_group("listed", Group("--list", 1))
    assert row.result.startswith("no test ran")
    assert "all-groups *groups" in (tmp_path / "outputs/listed.log").read_text()


def test_a_group_whose_time_is_over_still_says_what_had_passed() -> None:
    interrupted = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background lets it be ignored
try:
    print("begun", flush=True)
    time.sleep(50)
except KeyboardInterrupt:
    print("3 passed in 1.00s")
"""
    with subprocess.Popen([sys.executable, "-c", interrupted], stdout=subprocess.PIPE, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"begun\n"
        assert wait_at_most(running, 0.0) is None
        assert count(running.stdout.read().decode()) == Counter(passed=3)


def test_rows_of_groups_that_did_not_run_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(groups, "TABLE", tmp_path / "table.md")
    write_table([Row("trl", Counter(passed=18), "green", 50.4, "abc")])
    write_table([Row("api", Counter(passed=3, failed=1), "red", 9.6, "def")])
    text = (tmp_path / "table.md").read_text()
    assert "| trl | 18 | 0 | 0 | green | 50 | abc |\n" in text
    assert "| api | 3 | 1 | 0 | red | 10 | def |\n" in text
    assert "| chaos | | | | not run yet | | |\n" in text


def test_an_unknown_group_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trl", "tlr"]) == 2
    assert "no such group: tlr; there are trl, openenv" in capsys.readouterr().err


def test_every_group_is_a_recipe() -> None:
    recipes = (groups.ROOT / "justfile").read_text()
    assert [group.recipe for group in groups.GROUPS.values() if f"\n{group.recipe.split()[0]} " not in recipes] == []


def test_the_slow_tests_that_a_group_of_their_own_runs_are_left_out_of_slow_and_no_others() -> None:
    bodies = dict(re.findall(r"^([a-z-]+)\b[^\n]*:\n((?:    .*\n)+)", (groups.ROOT / "justfile").read_text(), re.MULTILINE))
    left_out = set(re.findall(r"--ignore=(\S+)", bodies["test-slow"]))
    others = {group.recipe.split()[0] for name, group in groups.GROUPS.items() if name != "slow"}
    # Without `-m`, or with another mark alone, pytest leaves slow tests out.
    commands = [
        line for name in others for line in bodies[name].splitlines() if re.search(r"-m (slow|'slow or not slow') ", line)
    ]
    named = {word for line in commands for word in line.split() if word.startswith("tests/")}
    assert left_out == {path for path in named if has_slow_tests(groups.ROOT / path)}


def has_slow_tests(path: Path) -> bool:
    return any("mark.slow" in file.read_text() for file in ([path] if path.is_file() else path.rglob("test_*.py")))
