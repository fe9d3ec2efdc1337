"""Output of environments becomes plain data, or a clear refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fleetbus_schemas import ChatMessage, ContextChange, Image, Text, ToolSpec
from fleetbus_workers.environment.base import Step
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
