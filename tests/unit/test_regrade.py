"""Recorded episodes graded again: flips are those that the function itself gives, and nothing that a recording names is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import ChatMessage, EpisodeRequested, Task, encode
from fleetbus_schemas.message import decode
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import SUBJECTS, LogBuilder, start_log

VERIFIER = '''\
def count_digits(final_answer, conversation):
    """A quarter of a point per digit of the answer."""
    return sum(letter.isdigit() for letter in final_answer or "") / 4

def asks(env, final_answer):
    return env.query("SELECT 1")

def knows_task(task, final_answer):
    return float(task["config"]["answer"] == final_answer and task["prompt"] == "How many?")

async def waits(conversation):
    return float(len(conversation) == 2 and conversation[1]["role"] == "assistant")

def has_no_number(final_answer):
    return "1"
'''
ANSWERS = ("12", "1", "none", "1234", "7a", "", "999", "12")


def play(log: LogBuilder, episode: str, answer: str, reward: float | None, **changes: Any) -> None:
    """An episode of one turn whose task is not that of the builder."""
    log.request(episode, split=changes.get("split", "train"))
    subject, payload = log.entries[-1]
    task = Task(
        key=f"task-{episode}", env="no_such_module:Environment", prompt="How many?", config={"answer": "12"},
        verifier=f"open({str(changes.pop('canary', '/nonexistent'))!r}, 'w')\ndef verify(env): return 1",
    )  # fmt: skip
    log.entries[-1] = subject, encode(msgspec.structs.replace(decode(EpisodeRequested, payload), task=task))
    log.claim(episode)
    log.observe(episode, 0, messages=(ChatMessage(role="user", content="How many?"),))
    action = log.act(episode, 0, text=answer)
    log.finish(episode, [action], reward=reward, task_key=task.key, **changes)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    file = tmp_path / "verifier.py"
    file.write_text(VERIFIER)
    return file


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    log = start_log()
    for index, answer in enumerate(ANSWERS):
        play(log, f"e{index}", answer, 0.5, split="eval" if index == 3 else "train", canary=tmp_path / "canary")
    play(log, "e8", "12", None, outcome="verifier_unknown")
    play(log, "e9", "12", None, outcome="env_failed")
    log.step(1, ["e1", "e2"])
    file = tmp_path / "run.fbrec"
    with create_recording(file, RecordingHeader(run=SUBJECTS.run)) as writer:
        writer.add([StreamEntry(subject=s, payload=p, sequence=n, time_ns=n) for n, (s, p) in enumerate(log.entries, start=1)])
        writer.finish()
    return file


def regrade(recording: Path, verifier: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run_program(["regrade", str(recording), "--verifier", verifier, "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_flips_are_those_of_the_function_itself(
    recording: Path, verifier: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scope: dict[str, Any] = {}
    exec(VERIFIER, scope)
    rewards = {f"e{index}": scope["count_digits"](answer, []) for index, answer in enumerate(ANSWERS)} | {"e8": 0.5}
    found = regrade(recording, f"{verifier}:count_digits", capsys)
    assert {flip["episode_id"]: flip["new"] for flip in found["flips"]} == {
        episode: reward for episode, reward in rewards.items() if reward != 0.5 or episode == "e8"
    }
    assert (found["episodes"], found["same"], found["skipped"], found["without_verdict"]) == (9, 2, 1, 0)
    uses = {flip["episode_id"]: flip["use"] for flip in found["flips"]}
    assert (uses["e1"], uses["e3"], uses["e5"]) == ("trained", "held out", "not trained")
    assert [flip["episode_id"] for flip in found["flips"] if flip["crosses"]] == ["e3"]
    assert {flip["episode_id"]: flip["old"] for flip in found["flips"]}["e8"] is None
    assert not (tmp_path / "canary").exists()  # the verifier that the recording holds was not run


def test_a_function_gets_the_task_and_may_be_asynchronous(
    recording: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = regrade(recording, f"{verifier}:knows_task", capsys)
    assert {flip["episode_id"] for flip in found["flips"] if flip["new"] == 1.0} == {"e0", "e7", "e8"}
    found = regrade(recording, f"{verifier}:waits", capsys)
    assert {flip["new"] for flip in found["flips"]} == {1.0}
    assert len(found["flips"]) == 9


@pytest.mark.parametrize(("name", "reason"), [("asks", "has no environment"), ("has_no_number", "returned str")])
def test_what_gives_no_number_is_no_verdict_and_no_flip(
    recording: Path, verifier: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    found = regrade(recording, f"{verifier}:{name}", capsys)
    assert (found["flips"], found["without_verdict"]) == ([], 9)
    assert all(reason in each for each in found["reasons"])


def test_a_tasks_file_replaces_the_verifiers_of_its_tasks_alone(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "def verify(final_answer): return 0.5 if final_answer == '12' else 0.0"
    tasks = [{"key": f"task-e{index}", "prompt": "How many?", "verifier_code": code} for index in range(3)]
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    found = regrade(recording, str(tmp_path / "tasks.json"), capsys)
    assert [flip["episode_id"] for flip in found["flips"]] == ["e1", "e2"]
    assert (found["same"], found["skipped"]) == (1, 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("missing.py:verify", "cannot read"),
        ("{file}:absent", "defines no function absent"),
        ("{file}", "defines no function verify; it defines count_digits"),
        ("broken.py:verify", "is no Python"),
        ("os:system", "os:system: file not found"),
    ],
)
def test_a_wrong_verifier_is_refused_in_one_line(
    recording: Path, verifier: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any, given: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def verify(:")
    assert run_program(["regrade", str(recording), "--verifier", given.format(file=verifier)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_the_table_shows_flips_and_counts(recording: Path, verifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["regrade", str(recording), "--verifier", f"{verifier}:count_digits", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "9 episodes graded again: 2 as before, 7 otherwise (1 held out, 4 not trained, 2 trained), 2 shown" in shown
    assert "mean reward 0.500 ->" in shown
