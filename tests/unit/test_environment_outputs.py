"""Output of environments becomes plain data, or a clear refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import Action, AttemptStarted, ChatMessage, ContextChange, EpisodeRequested, Image, Task, Text, ToolSpec
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.check.episode import play_episode
from fleetbus_workers.environment.check.policies import build_scripted_policy
from fleetbus_workers.environment.episode.runner import EpisodeRunner
from fleetbus_workers.environment.episode.stages import EpisodeEnded
from fleetbus_workers.environment.normalization import clip_messages, to_plain_number, to_plain_values
from fleetbus_workers.environment.validation import InvalidReturn, check_messages, validate_return


def test_numbers_and_arrays_of_other_libraries_become_plain_values() -> None:
    told = {"a": np.float32(0.5), "b": np.array([[1, 2]]), 3: np.bool_(True), "d": (1, {"e": {2}}), "f": b"x", "g": None}
    assert to_plain_values(told) == {"a": 0.5, "b": [[1, 2]], "3": True, "d": [1, {"e": [2]}], "f": "b'x'", "g": None}


def test_what_json_cannot_say_becomes_a_word_and_neither_an_error_nor_nothing() -> None:
    told = {"a": math.nan, "b": [math.inf, np.float64("nan")], "c": np.float32("-inf")}
    assert to_plain_values(told) == {"a": "NaN", "b": ["Infinity", "NaN"], "c": "-Infinity"}


def test_a_text_that_spells_a_number_is_no_number() -> None:
    assert to_plain_number(np.float32(0.25)) == 0.25  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        to_plain_number("0.25")  # type: ignore[arg-type]


def test_messages_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="ChatMessage"):
        check_messages(["hello"])  # type: ignore[list-item]


def test_a_long_text_is_cut_between_characters_and_says_how_much_is_missing() -> None:
    (cut,) = clip_messages([ChatMessage(role="user", content="é" * 10)], 5)
    assert cut.content == "éé\n[cut: 16 more bytes]"


def test_text_beside_images_is_cut_as_text_alone_is() -> None:
    image = Image(object="0" * 64)
    (cut,) = clip_messages([ChatMessage(role="user", content=(Text(text="abc"), image, Text(text="defgh"), image))], 5)
    assert cut.content == (Text(text="abc"), image, Text(text="de\n[cut: 3 more bytes]"), image)


def test_messages_that_describe_tools_are_not_cut() -> None:
    described, asked = (ChatMessage(role=role, content="abcdefgh") for role in ("system", "user"))  # type: ignore[arg-type]
    assert clip_messages((described, asked), 5, whole=1)[0] == described


class Wordy:
    replayable = True

    async def open(self, task: Task) -> None: ...

    async def reset(self) -> Start:
        return Start(messages=(ChatMessage(role="user", content="long " * 20_000),))

    async def step(self, action: Action) -> Step:
        return Step(terminated=True, messages=(ChatMessage(role="user", content="long " * 20_000),))

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        return Verdict(reward=1.0)

    async def close(self) -> None: ...


async def test_a_long_first_prompt_is_cut_before_the_policy_is_asked() -> None:
    asked: list[ChatMessage] = []

    class Refusing:
        async def ask(self, turn: int, messages: tuple[ChatMessage, ...], *_: object, **__: object) -> None:
            asked.extend(messages)
            raise EpisodeEnded("lost", "asked", "no answer")

    runner = EpisodeRunner(
        request=EpisodeRequested(
            episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="p", deadline_ns=0
        ),
        claim=AttemptStarted(episode_id="e", attempt=1, worker="w", nonce="n", lane="l"),
        environment=Wordy(),
        policy_client=Refusing(),  # type: ignore[arg-type]
        recorded=(),
        observed={},
        deadline=Deadlines().open(),
        settings=EnvironmentSettings(observation_bytes=1000),
        limits=LimitSettings(),
    )
    await runner.play()
    assert [str(message.content)[-24:] for message in asked] == ["\n[cut: 99000 more bytes]"]


async def test_a_check_plays_long_texts_cut_as_a_run_does() -> None:
    configuration = Configuration(environment=EnvironmentSettings(observation_bytes=1000))
    played = await play_episode(Wordy, Task(key="t"), build_scripted_policy([]), configuration, turns=2)
    for message in (*played.exchanges[0].messages, *played.last):
        assert str(message.content).endswith("[cut: 99000 more bytes]")


SHOWN = (ChatMessage(role="user", content="go on"),)


@pytest.mark.parametrize(
    ("change", "messages", "reason"),
    [
        (ContextChange(keep_turns=-1), SHOWN, "it must be 0 or more"),
        (ContextChange(reason="other"), SHOWN, r"Invalid enum value 'other'"),  # type: ignore[arg-type]
        (ContextChange(keep_turns=2, resume=0), SHOWN, "continues in one way"),
        (ContextChange(keep_turns=2, tools=(ToolSpec(name="look"),)), SHOWN, "with a new prompt only"),
        (ContextChange(resume=0, tools=(ToolSpec(name="look"),)), SHOWN, "with a new prompt only"),
        (ContextChange(), (), r"Step\.messages are empty"),
    ],
)
def test_a_change_of_context_that_would_be_half_done_is_refused(
    change: ContextChange, messages: tuple[ChatMessage, ...], reason: str
) -> None:
    with pytest.raises(InvalidReturn, match=reason):
        validate_return(Step, Step(messages=messages, context=change), "step")


def test_a_change_of_context_is_taken_with_what_it_needs() -> None:
    for change in (ContextChange(tools=(ToolSpec(name="look"),)), ContextChange(keep_turns=10**30), ContextChange(resume=3)):
        assert validate_return(Step, Step(messages=SHOWN, context=change), "step").context == change
    assert validate_return(Step, Step(terminated=True, context=ContextChange()), "step").terminated
