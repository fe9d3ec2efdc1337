"""Errors of a flag name it as it was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus_workers.cli.program import run_program


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps = 0 "),
        (["--steps=0"], "--steps = 0 "),
        (["--learner-steps", "0"], "--learner-steps = 0 "),
        (["--seed", "1", "--learner-steps=0"], "--learner-steps = 0 "),
        (["--run-seed", "x"], "--run-seed = x "),
        (["--nats-lanes", "x"], "--nats-lanes = x "),
    ],
)
def test_a_value_that_is_not_allowed_is_told_with_the_flag_that_was_given(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["up", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"fleetbus: {named}is not allowed: ")


def test_a_run_that_is_another_is_told_with_the_flag_that_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".fleetbus" / "runs" / "r"
    folder.mkdir(parents=True)
    identity = '{"model":"","tasks":"","environment":"warehouse","seed":1,"policy":"default","pool":"default"}'
    (folder / "run.json").write_text(identity)
    assert run_program(["up", "--run", "r", "--seed", "2"]) == 2
    assert "seed 1, not 2 (--seed)" in capsys.readouterr().err
