"""Worked conversations before each task: read from a file, shown after the instructions, written out of a recorded episode."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.config.settings import EnvironmentSettings
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.examples import insert_examples, read_examples
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

RECORDING = Path(__file__).parents[1] / "replay" / "recordings" / "guessing.fbrec"
QUESTION, ANSWER = ChatMessage(role="user", content="What is 1 + 2?"), ChatMessage(role="assistant", content="3")


def write(folder: Path, content: object) -> str:
    file = folder / "examples.json"
    file.write_text(json.dumps(content))
    return str(file)


def test_no_file_means_no_examples_and_a_file_is_a_conversation(tmp_path: Path) -> None:
    assert read_examples("") == ()
    file = write(tmp_path, [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}])
    assert read_examples(file) == (QUESTION, ANSWER)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no messages"),
        ({"role": "user"}, "JSON list of messages"),
        ([{"role": "user", "content": "alone"}], "must be an answer"),
        ([{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}], "leave out messages of role system"),
        ([{"role": "assistant", "content": "x" * (1 << 18)}], "over 262144 bytes"),
    ],
)
def test_a_file_that_is_no_worked_conversation_is_refused_by_what_is_wrong(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_examples(write(tmp_path, content))


def test_a_run_whose_examples_are_missing_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--run-folder", str(tmp_path), "--environment-examples", str(tmp_path / "none.json"), "--no-monitor"]
    assert run_program(["up", *options]) == 2
    assert "environment.examples" in capsys.readouterr().err


def test_examples_stand_between_the_instructions_and_the_task() -> None:
    system, task = ChatMessage(role="system", content="Calculate."), ChatMessage(role="user", content="What is 4 + 5?")
    assert insert_examples((system, task), (QUESTION, ANSWER)) == (system, QUESTION, ANSWER, task)
    assert insert_examples((task,), (QUESTION, ANSWER)) == (QUESTION, ANSWER, task)
    assert insert_examples((system, task), ()) == (system, task)


async def test_every_episode_begins_with_the_examples(tmp_path: Path) -> None:
    file = write(tmp_path, msgspec.to_builtins([QUESTION, ANSWER]))
    configuration = build_configuration(environment=EnvironmentSettings(slots=2, examples=file))
    with anyio.fail_after(100):
        async with small_deployment(configuration) as fleet:
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            await fleet.request()
            assert (await fleet.result()).outcome == "completed"
            first, *rest = sorted(await fleet.observations(), key=lambda each: each.turn)
    assert [message for message in first.messages if message in (QUESTION, ANSWER)] == [QUESTION, ANSWER]
    assert not any(message in (QUESTION, ANSWER) for each in rest for message in each.messages)


def test_a_recorded_episode_is_written_as_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["episodes", str(RECORDING), "--json", "--limit", "0"]) == 0
    rows = json.loads(capsys.readouterr().out)
    episode = next(row["episode_id"] for row in rows if row["outcome"] == "completed")
    file = tmp_path / "example.json"
    assert run_program(["episodes", str(RECORDING), episode, "--output", str(file)]) == 0
    examples = read_examples(str(file))
    assert examples[-1].role == "assistant" and "system" not in {message.role for message in examples}
