"""A starter policy for an environment of somebody's own: the random play that it imitates, and a build of a few steps."""

import filecmp
import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fleetbus import ChatMessage, Start, Step, Task, Verdict
from fleetbus.config.settings import Configuration
from fleetbus.core.text.prompts import TOOL_RESULT
from fleetbus.core.text.tool_calls import final_answer, is_done, parse_tool_calls
from fleetbus.errors import UserError
from fleetbus_schemas import ToolSpec
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.check.episode import Exchange, PlayedEpisode
from fleetbus_workers.starter.conversation import Conversation
from fleetbus_workers.starter.environment_starter import (
    REWARDED_SHARE,
    EnvironmentStarterSettings,
    _read_conversation,
    build_environment_starter,
    choose_imitated,
    play_guesses,
)
from fleetbus_workers.starter.guessing_player import build_guessing_player
from fleetbus_workers.starter.tokenizer import CHAT_TEMPLATE, encode, render, train_tokenizer
from tests.support.backends import asyncio_alone

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"enum": ["small", "large"]}, "age": {"type": "integer"}},
    "required": ["name", "size", "age"],
}
TOOLS = (ToolSpec(name="find", description="", parameters=SCHEMA),)


def user(text):
    return ChatMessage(role="user", content=text)


def say(*messages, tools=(), times=60):
    return {build_guessing_player(seed)(messages, tools) for seed in range(times)}


def test_calls_take_their_arguments_from_the_question_and_the_schema():
    calls = [parse_tool_calls(text).call for text in say(user('Find "Ada" of 41 or 42.'), tools=TOOLS)]
    assert all(call is not None and call.name == "find" for call in calls)
    assert {call.arguments["name"] for call in calls} == {"Ada"}
    assert {call.arguments["size"] for call in calls} == {"small", "large"}
    assert {call.arguments["age"] for call in calls} == {41, 42}


def test_after_a_result_its_values_are_answered_or_used_in_the_next_call():
    result = user(TOOL_RESULT + json.dumps({"card": 682, "owner": ["Eva"]}))
    said = say(user("Who has 3? End with <done>."), ChatMessage(role="assistant", content="..."), result, tools=TOOLS)
    answers = {final_answer(text) for text in said if is_done(text)}
    ages = {call.arguments["age"] for text in said if (call := parse_tool_calls(text).call)}
    assert answers == {"682", "Eva"}
    assert ages == {682}


def test_an_answer_ends_with_a_mark_only_where_one_is_asked_for():
    said = say(user("Who has 3?"), ChatMessage(role="assistant", content="..."), user("Tool result:\n682"), tools=TOOLS)
    assert "682" in said and not any(is_done(text) for text in said)


def test_what_is_imitated_has_the_tools_that_the_chat_template_renders():
    messages = (ChatMessage(role="system", content="Be short."), user("Who?"))
    result = (ChatMessage(role="tool", content="7"),)
    exchanges = [Exchange(messages=messages, said="find"), Exchange(messages=result, said="7")]
    imitated = _read_conversation(PlayedEpisode(exchanges=exchanges, tools=TOOLS, rendered_tools=TOOLS)).messages
    template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=CHAT_TEMPLATE)
    asked = [*messages, *imitated[2:3], *result, imitated[-1]]
    told = [{"role": each.role, "content": each.content} for each in asked]
    described = [{"type": "function", "function": msgspec.to_builtins(TOOLS[0]) | {"description": ""}}]
    assert render(imitated) == template.apply_chat_template(told, tools=described, tokenize=False)
    offered = _read_conversation(PlayedEpisode(exchanges=exchanges, tools=TOOLS)).messages
    assert offered[0].content == "Be short.", "an environment that describes its tools itself has said it"


def test_random_play_without_any_difference_is_refused_before_anything_is_built(tmp_path):
    played = [(Conversation(messages=(user("?"),), success=False), 0.0)] * 20
    with pytest.raises(UserError, match="20 random episodes all had the reward 0: no signal to begin with; pay partial"):
        build_environment_starter(tmp_path / "small", played, report=print)
    assert not (tmp_path / "small").exists()


def test_an_error_of_a_tool_is_never_the_answer():
    said = say(user("Who?"), ChatMessage(role="assistant", content="..."), user("Error: no reader 7"), tools=TOOLS)
    assert not any(is_done(text) for text in said)


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("Is it red or blue?\nGive the answer alone, between <answer> and </answer>.", r"<answer>\S+</answer>"),
        ("Guess from 1 to 5. Write your guess in square brackets.", r"\[\S+\]"),
        ("What is 2 + 2? Put it into \\boxed{}.", r"\\boxed\{\S+\}"),
        ("Say yes or no, then <done>.", r"\S+ <done>"),
    ],
)
def test_answers_have_the_form_that_is_asked_for(prompt, form):
    assert all(re.fullmatch(form, text) for text in say(user(prompt)))


def test_numbers_within_the_limits_of_the_prompt_and_listed_options_are_said():
    said = say(user("Guess my number between 3 and 6. Moves: left, turn back, right."), times=200)
    assert {"3", "4", "5", "6", "left", "turn back", "right"} <= said


def test_actions_that_are_listed_are_said_most_of_the_time_and_as_they_stand_there():
    shown = "You are at the letter in brackets.\n\nAnswer with one action: left, down, right, up.\n\n[S]FFF"
    said = [build_guessing_player(seed)([user(shown)], ()) for seed in range(200)]
    assert sum(text in {"left", "down", "right", "up"} for text in said) > 140


def test_the_same_seed_plays_the_same():
    assert say(user("One of: a, b, c"), times=1) == say(user("One of: a, b, c"), times=1)


def test_what_was_rewarded_above_the_mean_is_a_third_of_what_is_imitated():
    good, bad = (Conversation(messages=(user(text),), success=False) for text in ("good", "bad"))
    chosen = choose_imitated([(bad, 0.0)] * 99 + [(good, 1.0)], seed=0)
    assert sum(each is good for each in chosen) / len(chosen) == pytest.approx(REWARDED_SHARE, abs=0.03)
    assert {id(each) for each in choose_imitated([(bad, 0.5)] * 3, seed=0)} == {id(bad)}


def test_a_word_is_the_same_tokens_in_a_question_in_quotes_and_in_json():
    tokenizer = train_tokenizer(['find the reader Nora {"name": "Nora"}'] * 9, whole_words=True)
    alone = encode(tokenizer, "Nora")
    for text in ("has Nora?", '{"name": "Nora"}'):
        ids = encode(tokenizer, text)
        assert any(ids[start : start + len(alone)] == alone for start in range(len(ids)))
        assert tokenizer.decode(ids) == text


class Echo:
    """Rewards the word of the task."""

    replayable = True

    async def open(self, task):
        self.task, self.said = task, ""

    async def reset(self):
        return Start(messages=(user(f"Say one of: {self.task.prompt}."),))

    async def step(self, action):
        self.said = action.text
        return Step(terminated=True)

    async def state(self):
        return {}

    async def verify(self):
        return Verdict(reward=float(self.said == "tea"))

    async def close(self):
        pass


class Broken(Echo):
    async def step(self, action):
        raise RuntimeError("the kettle is cold")


TASKS = [Task(key=f"t{number}", prompt="tea, milk, juice") for number in range(3)]

anyio_backend = asyncio_alone


@pytest.mark.anyio
async def test_the_play_of_a_seed_is_in_the_order_of_the_tasks_and_has_rewards():
    played = await play_guesses(Echo, TASKS, Configuration(), episodes=64, seed=0)
    again = await play_guesses(Echo, TASKS, Configuration(), episodes=64, seed=0)
    assert played == again
    assert len(played) == 64
    assert {reward for _, reward in played} == {0.0, 1.0}
    assert all((conversation.messages[-1].content == "tea") == bool(reward) for conversation, reward in played)


@pytest.mark.anyio
async def test_an_environment_that_fails_is_named_with_file_and_line():
    with pytest.raises(UserError, match=r"task t\d: .*the kettle is cold.*test_environment_starter.py:\d+"):
        await play_guesses(Broken, TASKS, Configuration(), episodes=4, seed=0)


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_build_of_a_few_steps_is_a_model_that_loads_and_the_same_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    played = await play_guesses(Echo, TASKS, Configuration(), episodes=64, seed=0)
    settings = EnvironmentStarterSettings(copy_steps=2, imitation_steps=2)
    lines: list[str] = []
    for name in ("one", "two"):
        report = build_environment_starter(tmp_path / name, played, report=lines.append, settings=settings)
    assert report.episodes == 64 and 0 < report.rewarded < 64
    assert lines[0].startswith("played 64 episodes, mean reward 0.")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one", local_files_only=True)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert filecmp.cmp(tmp_path / "one/model.safetensors", tmp_path / "two/model.safetensors", shallow=False)


def test_nothing_that_was_graded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no episode was graded"):
        build_environment_starter(tmp_path / "none", [], report=print)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--environment", "a:B", "--tasks", "t.json"], "name a FOLDER"),
        (["new", "--environment", "a:B"], "belong together"),
        (["new", "--tasks", "t.json"], "belong together"),
        (["new", "--vision", "--environment", "a:B", "--tasks", "t.json"], "not for --vision"),
        (["new", "--environment", "a:B", "--tasks", "missing.json"], "there is no such file"),
        (["new", "--environment", "nowhere_at_all:B", "--tasks", "tasks.json"], "cannot import nowhere_at_all"),
        (["full", "--environment", "a:B", "--tasks", "tasks.json"], "full is not empty"),
        (["tasks.json", "--environment", "a:B", "--tasks", "tasks.json"], "tasks.json"),
        (["new", "--environment", "a:B", "--tasks", "tasks.json", "--episodes", "3"], "--episodes"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.json").write_text('{"tasks": [{"key": "a", "prompt": "p"}, {"key": "b", "prompt": "q"}]}')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run_program(["starter", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"tasks.json", "full"}


@pytest.mark.integration
def test_numbers_without_end_are_played_with_too():
    assert say(user(f"Guess between 1 and {'9' * 5000}, or {'7' * 5000}."))
    assert say(user(f"Find {'7' * 5000}."), tools=TOOLS)
