"""`fleetbus check`: what is wrong with an environment is named with its place before anything is trained; `up` looks first."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetbus_schemas import Action
from fleetbus_workers.environment.base import Step

pytestmark = pytest.mark.integration

CASES = {
    "raise": ("step", "raise KeyError('no such room')", "KeyError", "FAILED"),
    "nothing": ("step", "return None", "step returned None; it must return Step", "FAILED"),
    "NaN": ("step", "return Step(reward=float('nan'))", "step was rewarded nan", "FAILED"),
    "wrong role": ("step", "return Step(messages=(ChatMessage(role='usr', content='hm'),))", "role is 'usr'", "FAILED"),
    "silence": ("step", "return Step()", "returned no messages and did not end", "FAILED"),
    "no prompt": ("reset", "return Start(messages=())", "reset returned no messages", "FAILED"),
    "wrong verdict": ("verify", "return Verdict(reward='good')", "Verdict.reward must be a number", "FAILED"),
    "no grade": ("verify", "return None", "verify returned None; it must return Verdict", "FAILED"),
    "no reason": ("verify", "return Verdict(reward=None)", "verify gave no verdict and no reason", "FAILED"),
    "its reason": ("verify", "return Verdict(reward=None, reason='asleep')", "verify gave no verdict: asleep", "warning"),
    "bad schema": (
        "reset",
        "return Start(messages=(ChatMessage(role='user', content='go'),), tools=(ToolSpec(name='look', "
        "parameters={'type': 'object', 'properties': {'a': {'type': 'int'}}, 'required': ['b']}),))",
        "parameters.a.type is 'int'",
        "FAILED",
    ),
    "random": (
        "reset",
        "return Start(messages=(ChatMessage(role='user', content=str(random.random())),))",
        "differed",
        "FAILED",
    ),
    "no first seat": (
        "step",
        "return Step(messages=(ChatMessage(role='user', content='go'),), seat='two')",
        "the step names the seat two, and Start.seat names none",
        "FAILED",
    ),
    "close": ("close", "raise OSError('gone')", "close: OSError", "FAILED"),
    "blocks": ("step", "import time; time.sleep(0.8)", "step blocked the event loop for 0.", "warning"),
    "free success": ("verify", "return Verdict(reward=1.0)", "doing nothing is rewarded 1", "warning"),
}


def fleetbus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetbus_workers.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def make(folder: Path, call: str = "", code: str = "", *options: str) -> int:
    """Write the template's environment with ``code`` at the beginning of ``call``; returns the line of that call."""
    assert fleetbus(folder, "new", "environment", "my_game", *options).returncode == 0
    lines = (folder / "my_game.py").read_text().replace("Verdict\n", "Verdict, ToolSpec\n", 1).splitlines()
    line = next(number for number, line in enumerate(lines, 1) if call and f"def {call}(" in line) if call else 0
    if call:
        body = line if '"""' not in lines[line] else line + 1
        lines.insert(body, f"        {code}")
    (folder / "my_game.py").write_text("\n".join(lines) + "\n")
    return line


CHECK = ("check", "my_game:MyGame", "--tasks", "my_game_tasks.json")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", list(CASES))
def test_a_mistake_is_named_with_its_file_and_line(tmp_path: Path, case: str) -> None:
    call, code, words, level = CASES[case]
    make(tmp_path, call, code)
    found = fleetbus(tmp_path, *CHECK)
    assert found.returncode == (1 if level == "FAILED" else 0), found
    (line,) = [line for line in found.stdout.splitlines() if words in line and line.startswith(level)]
    if "replay" not in line and case != "free success":
        assert f"in MyGame.{call}" in line and "my_game.py:" in line


def test_the_last_line_names_a_wrong_return_with_its_file_and_line(tmp_path: Path) -> None:
    line = make(tmp_path, "step", "return None")
    last = fleetbus(tmp_path, *CHECK).stdout.splitlines()[-1]
    assert last.startswith("FAILED") and f"(my_game.py:{line} in MyGame.step)" in last


@pytest.mark.parametrize("options", [(), ("--sync",)])
def test_the_template_passes_and_its_transcript_is_shown(tmp_path: Path, options: tuple[str, ...]) -> None:
    make(tmp_path, "", "", *options)
    played = fleetbus(tmp_path, *CHECK)
    assert played.returncode == 0, played
    assert "[user] Guess my number between 0 and 9" in played.stdout and "[assistant]" in played.stdout
    assert "replayable: yes" in played.stdout and "ok  task my_game-0" in played.stdout and "times: open" in played.stdout


def test_seats_that_the_verdict_does_not_name_are_named_with_its_place(tmp_path: Path) -> None:
    make(tmp_path, "reset", "return Start(messages=(ChatMessage(role='user', content='go'),), seat='one')")
    code = (tmp_path / "my_game.py").read_text().replace("return Verdict(", "return Verdict(seats={'two': 1.0}, ")
    (tmp_path / "my_game.py").write_text(code)
    checked = fleetbus(tmp_path, *CHECK)
    assert checked.returncode == 1
    assert "── turn 0 · one ──" in checked.stdout
    assert "no seat has a reward: Verdict.seats gives them by name" in checked.stdout
    assert "in MyGame.verify" in checked.stdout


def test_the_oracle_of_a_task_must_succeed(tmp_path: Path) -> None:
    make(tmp_path)
    tasks = json.loads((tmp_path / "my_game_tasks.json").read_text())["tasks"][:1]
    for oracle, code in (([str(digit) for digit in range(10)], None), ("no digit", 1)):
        tasks[0]["config"] = {"oracle": oracle}
        (tmp_path / "my_game_tasks.json").write_text(json.dumps(tasks))
        found = fleetbus(tmp_path, *CHECK, "--json")
        report = json.loads(found.stdout)
        if code is not None:
            assert found.returncode == code and report["oracle"] != 1.0
            assert any("oracle" in problem["text"] for problem in report["problems"])
    played = fleetbus(tmp_path, *CHECK, "--policy", "nonsense")
    assert played.returncode == 2 and "choose random" in played.stderr


def test_scripted_actions_and_own_policies_play(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "mine.py").write_text("def act(messages, tools):\n    return f'{len(messages)} is my guess'\n")
    assert "[assistant] is it 4?" in fleetbus(tmp_path, *CHECK, "--action", "is it 4?").stdout
    assert "[assistant] 1 is my guess" in fleetbus(tmp_path, *CHECK, "--policy", "mine:act").stdout


def test_environments_with_tools_are_checked_with_random_calls(tmp_path: Path) -> None:
    tasks = [{"key": "a", "prompt": "", "config": {"oracle": "x"}}]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    found = fleetbus(tmp_path, "check", "warehouse", "--policy", "random")
    assert found.returncode in (0, 1) and "tools: find_item, get_field" in found.stdout, found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def verify(env, final_anser): return 1", "verifier has the parameter 'final_anser'"),
        ("def verify(env): return {'score': 1}", "the verifier returned dict, not a number"),
    ],
)
def test_a_verifier_that_gives_no_number_is_a_failure(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps([{"key": "a", "prompt": "", "verifier_code": code}]))
    found = fleetbus(tmp_path, "check", "warehouse", "--tasks", "tasks.json", "--policy", "no-op")
    assert found.returncode == 1, found
    assert any(line.startswith("FAILED  verify gave no verdict: ") and words in line for line in found.stdout.splitlines())


@pytest.mark.timeout(180)
def test_up_refuses_an_environment_that_fails_its_first_episode(tmp_path: Path) -> None:
    make(tmp_path, "step", "return None")
    arguments = ("up", "--environment", "my_game:MyGame", "--tasks", "my_game_tasks.json")
    refused = fleetbus(tmp_path, *arguments)
    assert refused.returncode == 2, refused
    (line,) = refused.stderr.splitlines()
    assert "step returned None" in line and "in MyGame.step" in line and "fleetbus check my_game:MyGame" in line
    assert not (tmp_path / ".fleetbus").exists()


def test_a_call_that_never_returns_ends_the_process_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fleetbus_workers.cli.setup import check

    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    check.end_if_blocked(sys._getframe(), check.BLOCKED_LIMIT_SECONDS - 1)
    assert ended == []
    check.end_if_blocked(sys._getframe(), check.BLOCKED_LIMIT_SECONDS)
    assert ended == [1] and "test_check.py:" in capsys.readouterr().err


async def test_the_time_of_the_policy_is_not_blamed_on_the_environment() -> None:
    from fleetbus.config.settings import Configuration
    from fleetbus_schemas import Task
    from fleetbus_workers.environment.adapters.python_class.environment import ClassEnvironment
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.check.episode import BLOCKED_SECONDS, play_episode

    class InThreads(ScriptedEnvironment):
        def step(self, action: Action) -> Step:  # type: ignore[override]
            time.sleep(0.1)
            return Step(terminated=True)

    def think(*_: object) -> str:
        time.sleep(BLOCKED_SECONDS + 0.1)
        return "hm"

    played = await play_episode(lambda: ClassEnvironment(InThreads, None), Task(key="t"), think, Configuration(), turns=1)
    assert played.longest_step > 0.1 and not played.problems


def test_the_quick_part_is_given_up_after_a_second() -> None:
    from fleetbus.config.settings import Configuration
    from fleetbus_schemas import Task
    from fleetbus_workers.environment.adapter_context import Factory
    from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
    from fleetbus_workers.environment.check.quick import QUICK_SECONDS, check_quickly

    class Slow(ScriptedEnvironment):
        async def open(self, task: Task) -> None:
            time.sleep(3)  # noqa: ASYNC251  # as a newcomer would

    began = time.monotonic()
    check_quickly(Factory(Slow), "slow:Slow", Task(key="t"), Configuration())
    assert time.monotonic() - began < QUICK_SECONDS + 0.5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("spec", ["http:http://127.0.0.1:9/mcp", "openenv:http://127.0.0.1:9"])
def test_a_server_that_does_not_answer_is_one_line_and_bad_input(tmp_path: Path, spec: str) -> None:
    (tmp_path / "tasks.json").write_text('{"tasks": [{"key": "a", "prompt": "hi", "env_key": "x"}]}')
    found = fleetbus(tmp_path, "check", spec, "--tasks", "tasks.json", "--json")
    assert (found.returncode, found.stdout) == (2, ""), found
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("fleetbus: ")]
    assert f"environment {spec} does not open: no connection to the " in line and "check its address" in line
    assert "Traceback" not in found.stderr
