"""``fleetbus probe`` with real verifiers and environments: holes have status 1, the graders that ship have none."""

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
from fleetbus_workers.environment.own_images import ImageStoringEnvironment
from fleetbus_workers.probe.graders import VerifierGrader
from fleetbus_workers.probe.probing import HOPELESS
from fleetbus_workers.up.recipes import find_recipe, write_tasks
from tests.support.log_builder import SUBJECTS, LogBuilder, start_log

VERIFIER = '''\
def exact(final_answer, task):
    return float((final_answer or "").strip() == task["config"]["answer"])

def substring(final_answer, conversation, task):
    assert conversation[-1]["role"] == "assistant"
    return float(task["config"]["answer"] in (final_answer or ""))

def tests(final_answer, task):
    """Runs what is said in its own process."""
    import re
    code = re.search(r"```python\\n(.*?)\\n```", final_answer or "", re.DOTALL)
    scope = {}
    try:
        exec(code[1] if code else "", scope)
    except SystemExit as ended:
        return float(not ended.code)
    except Exception:
        return 0.0
    return float("solve" in scope and scope["solve"]() == task["config"]["answer"])

def hangs(final_answer, task):
    while final_answer == "NaN":
        pass
    print("said " * 100)
    return exact(final_answer, task)

def sleeps(final_answer, task):
    __import__("time").sleep(60)

def asks(env):
    return env.query("SELECT 1")
'''
ENVIRONMENT = '''\
from fleetbus import ChatMessage, Start, Step, Verdict

class Paid:
    """Pays for a word."""
    replayable = True
    async def open(self, task): self.task, self.said = task, ""
    async def reset(self): return Start(messages=(ChatMessage(role="user", content=self.task.prompt),))
    async def step(self, action):
        self.said = action.text
        return Step(terminated=True)
    async def verify(self):
        print("graded")
        return Verdict(reward=1.0 if "Begin" in self.said or self.said == "a" else 0.0)
    async def state(self): return {}
    async def close(self): pass

class Hangs(Paid):
    async def step(self, action):
        import anyio
        await anyio.sleep_forever()

class Ends(Paid):
    async def verify(self):
        if "SystemExit" in self.said:
            raise SystemExit(0)
        return Verdict(reward=float(self.said == self.task.config["answer"]))
'''


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    file = tmp_path / "verifier.py"
    file.write_text(VERIFIER)
    return file


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.json"
    own = "def verify(final_answer): return float((final_answer or '').strip() == '{}')"
    told = [
        {
            "key": f"t{n}",
            "prompt": f"How many, number {n}?",
            "config": {"answer": f"{n}7"},
            "verifier_code": own.format(f"{n}7"),
        }
        for n in range(1, 4)
    ]
    file.write_text(json.dumps({"tasks": told}))
    return file


def probe(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> dict[tuple[str, str], dict[str, Any]]:
    assert run_program(["probe", *arguments, "--json"]) == status
    found = json.loads(capsys.readouterr().out)["findings"]
    return {(each["kind"], each["what"]): each for each in found}


@pytest.mark.integration
def test_a_sound_verifier_has_status_0_and_a_hole_status_1(
    verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(capsys, "--tasks", str(tasks), status=0) == {}  # the verifiers of the tasks themselves
    assert probe(capsys, "--tasks", str(tasks), "--verifier", f"{verifier}:exact", status=0) == {}
    found = probe(capsys, "--tasks", str(tasks), "--verifier", f"{verifier}:substring", status=1)
    assert found["false_accept", "one or another"]["count"] == 3


def test_code_that_ends_the_tests_or_equals_all_is_tried_where_it_harms_nothing(
    verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = probe(capsys, "--tasks", str(tasks), "--verifier", f"{verifier}:tests", status=1)
    assert {("false_accept", "a clean exit"), ("false_accept", "an object equal to all")} <= set(found)
    assert "process died" in found["crash", "an exit before the tests"]["example"]["reason"]
    assert not Path("conftest.py").exists()


@pytest.mark.integration
def test_a_verifier_that_hangs_is_ended_and_what_it_prints_is_not_shown(
    verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = probe(capsys, "--tasks", str(tasks), "--verifier", f"{verifier}:hangs", "--seconds", "0.5", status=1)
    assert list(found) == [("crash", "not a number")]
    assert "no verdict within 0.5 s" in found["crash", "not a number"]["example"]["reason"]


@pytest.mark.integration
def test_a_verifier_that_always_hangs_is_given_up(
    verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    grade = VerifierGrader.grade

    async def count(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return await grade(*arguments, **options)

    monkeypatch.setattr(VerifierGrader, "grade", count)
    arguments = ("--tasks", str(tasks), "--verifier", f"{verifier}:sleeps", "--seconds", "0.1", "--concurrency", "8")
    assert run_program(["probe", *arguments]) == 2
    assert "no verdict within 0.1 s" in capsys.readouterr().err and len(asked) <= 2 * HOPELESS + 2 * 8


def record(file: Path, answers: dict[str, list[tuple[str, float]]]) -> Path:
    """A recording of one-turn episodes: by task what was said and the reward then."""
    log: LogBuilder = start_log()
    for key, said in answers.items():
        for index, (text, reward) in enumerate(said):
            episode = f"{key}-{index}"
            log.request(episode)
            subject, payload = log.entries[-1]
            task = Task(key=key, prompt="How many of these are there?", config={"answer": "1200"})
            log.entries[-1] = subject, encode(msgspec.structs.replace(decode(EpisodeRequested, payload), task=task))
            log.claim(episode)
            log.observe(episode, 0, messages=(ChatMessage(role="user", content=task.prompt),))
            log.finish(episode, [log.act(episode, 0, text=text)], reward=reward, task_key=key)
    with create_recording(file, RecordingHeader(run=SUBJECTS.run)) as writer:
        writer.add([StreamEntry(subject=s, payload=p, sequence=n, time_ns=n) for n, (s, p) in enumerate(log.entries, start=1)])
        writer.finish()
    return file


@pytest.mark.integration
def test_what_was_sampled_is_tried(verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [("1200", 1.0), ("1,200", 0.0), ("", 0.0), ("How many of these are there?", 0.0), ("Error: no such tool", 0.0)]
    file = record(tmp_path / "run.fbrec", {"a": said, "b": [("well", 1.0), ("1200", 1.0)]})
    found = probe(capsys, str(file), "--verifier", f"{verifier}:exact", status=1)
    assert list(found) == [("false_reject", "sampled: the right answer in other dress")]
    assert found["false_reject", "sampled: the right answer in other dress"]["example"]["said"] == "1,200"
    verifier.write_text("def lax(final_answer): return float((final_answer or '')[:1] in '1wHE')")
    found = probe(capsys, str(file), "--verifier", f"{verifier}:lax", status=1)
    assert ("false_accept", "sampled: an answer without the right one in it") in found
    assert ("false_accept", "sampled: the prompt copied") in found
    assert ("false_accept", "sampled: a tool's error") in found


def test_an_environment_plays_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "paid.py").write_text(ENVIRONMENT)
    file = record(tmp_path / "run.fbrec", {"a": [("a", 1.0)]})
    found = probe(capsys, str(file), "--environment", f"{tmp_path / 'paid.py'}:Paid", status=1)
    assert found["false_accept", "steps without content"]["example"]["rewards"] == [1.0, 1.0]


def test_an_environment_that_would_end_its_process_is_a_finding(
    tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "paid.py").write_text(ENVIRONMENT)
    found = probe(capsys, "--tasks", str(tasks), "--environment", f"{tmp_path / 'paid.py'}:Ends", status=1)
    assert "SystemExit: verify" in found["crash", "a clean exit"]["example"]["reason"]


def test_an_environment_that_paces_itself_is_given_up_after_the_same_seconds(
    tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageStoringEnvironment, "paces_itself", True, raising=False)
    (tmp_path / "paid.py").write_text(ENVIRONMENT)
    arguments = ("--tasks", str(tasks), "--environment", f"{tmp_path / 'paid.py'}:Hangs", "--seconds", "0.2")
    assert run_program(["probe", *arguments]) == 2
    assert "0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["arithmetic", "countdown", "default", "sums"])
def test_the_environments_that_ship_raise_no_alarm(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expect_silence(capsys, "--recipe", recipe, "--cases", "1")


@pytest.mark.parametrize("recipe", ["calculator", "own-tools", "search"])
def test_the_verifiers_that_ship_raise_no_alarm(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expect_silence(capsys, "--tasks", str(write_tasks(find_recipe(recipe))), "--cases", "4")


def expect_silence(capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    assert run_program(["probe", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert report["right_reward"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to probe"),
        (["missing.fbrec"], "no grader"),
        (["missing.fbrec", "--verifier", "{file}:exact"], "missing.fbrec"),
        (["--tasks", "{tasks}", "--verifier", "{file}:none"], "defines no function none"),
        (["--tasks", "{tasks}", "--verifier", "{file}:exact", "--environment", "warehouse"], "two graders"),
        (["run", "--tasks", "{tasks}"], "two sources"),
        (["--tasks", "{tasks}", "--verifier", "{file}:asks"], "give --environment SPEC"),
        (["--recipe", "none"], "no recipe 'none'"),
        (["--tasks", "{tasks}", "--verifier", "{file}:exact", "--seconds", "nan"], "nan is not a finite number"),
    ],
)
def test_bad_input_is_one_line(
    verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run_program(["probe", *(each.format(file=verifier, tasks=tasks) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_the_table_names_holes_with_an_example(verifier: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["probe", "--tasks", str(tasks), "--verifier", f"{verifier}:substring"]) == 1
    shown = capsys.readouterr().out
    assert "false accept: an answer that is wrong, or holds no work, is paid; for example" in shown
    assert "3 of 3" in shown
    assert "right answers earn 1 (bare)" in shown
