"""An agent with one session's key tries tokens against it, offline: short ones are refused, and each guess is slow."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from fleetbus.config.settings import RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.adapters.agent.sessions import KeyRefused
from fleetbus_workers.gateway.agent_keys import SessionKeys, read_secret

RUN = RunSettings(name="r")
TOKEN = "7Qd0xV-long-enough-and-random"
GUESSES_PER_SECOND = 100.0


@pytest.mark.parametrize("token", ["a", "opener", "hunter2hunter2hunter2", "0" * 64, "abcabcabcabcabcabcabcabc"])
def test_a_token_that_can_be_guessed_makes_no_keys(token: str) -> None:
    with pytest.raises(UserError, match="AGENTS_TOKEN can be guessed"):
        read_secret(token, RUN)


def test_the_command_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTS_TOKEN", "hunter2")
    assert run_program(["gateway", "agents", "--nats", "nats://127.0.0.1:1", "--run", "r"]) == 2
    said = capsys.readouterr().err
    assert "AGENTS_TOKEN can be guessed" in said and "hunter2" not in said


@pytest.mark.integration
def test_guesses_against_a_key_are_slow_whatever_is_guessed() -> None:
    key = SessionKeys(read_secret(TOKEN, RUN), "r").make("e1", 10**18)
    began, guesses = time.process_time(), 4
    for number in range(guesses):
        with pytest.raises(KeyRefused):
            SessionKeys(read_secret(f"{TOKEN[:-1]}{number}", RUN), "r").read(key, 0)
    assert guesses / (time.process_time() - began) < GUESSES_PER_SECOND
    with pytest.raises(KeyRefused):  # the secret is no fast function of the token
        SessionKeys(hashlib.sha256(TOKEN.encode()).digest(), "r").read(key, 0)


def test_two_runs_with_one_token_have_keys_of_their_own() -> None:
    key = SessionKeys(read_secret(TOKEN, RUN), "r").make("e1", 10**18)
    with pytest.raises(KeyRefused):
        SessionKeys(read_secret(TOKEN, RunSettings(name="s")), "r").read(key, 0)
