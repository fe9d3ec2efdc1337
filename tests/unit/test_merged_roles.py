"""Conversations that strict templates refuse are merged as providers do, and by no other template."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus_schemas import ChatMessage
from fleetbus_workers.inference import merged_roles
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.merged_roles import join_contents, list_merges
from tests.support.template_folders import write_template_folder
from tests.unit.test_template_tools import TEXTS, TOOLS

SHORT = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def build(said: str) -> list[dict[str, str]]:
    return [{"role": SHORT[part[0]], "content": part[1:]} for part in said.split()]


def describe(messages: list[dict[str, str]]) -> str:
    return " ".join(message["role"][0] + message["content"].replace("\n\n", "+") for message in messages)


@pytest.mark.parametrize(
    ("said", "merges"),
    [
        ("s1 u2 a3 u4", []),
        ("s1 s2 u3", ["s1+2 u3"]),
        ("s1 u2 s3", ["s1 u2+3"]),
        ("s1 s2 u3 s4", ["s1+2 u3 s4", "s1+2 u3+4"]),
        ("u1 u2 a3 a4", ["u1+2 a3 a4"]),
        ("u1 a2 t3 t4 u5", ["u1 a2 t3 t4+5"]),
        ("u1 a2 t3 s4 u5", ["u1 a2 t3 u4+5", "u1 a2 t3+4+5"]),
        ("", []),
    ],
)
def test_each_merge_changes_a_little_more_and_loses_nothing(said: str, merges: list[str]) -> None:
    assert [describe(merged) for merged in list_merges(build(said))] == merges


def test_many_neighbours_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one: each time all that was joined so far would be copied."""
    joined: list[int] = []

    def count(*messages: merged_roles.Message) -> merged_roles.Message:
        joined.append(len(messages))
        return join_contents(*messages)

    monkeypatch.setattr(merged_roles, "join_contents", count)
    (merged,) = list_merges(build("s1 " + "u2 " * 1000))
    assert [len(message["content"]) for message in merged] == [1, 1000 + 999 * 2]
    assert 1000 in joined and len(joined) <= 10


def test_contents_of_texts_and_parts_are_joined_in_order() -> None:
    contents: list[object] = ["a", "b", [{"type": "image"}], "c", [{"type": "text", "text": "d"}]]
    joined = join_contents(*({"role": "user", "content": content} for content in contents))
    texts = [part.get("text", "image") for part in joined["content"]]
    assert texts == ["a\n\nb\n\n", "image", "\n\n", "c", "\n\n", "d"]


def test_parts_stay_parts() -> None:
    image = {"type": "image"}
    joined = join_contents({"role": "user", "content": [image]}, {"role": "user", "content": "x"})["content"]
    assert joined == [image, {"type": "text", "text": "\n\n"}, {"type": "text", "text": "x"}]


@pytest.fixture(scope="module", params=["mistral-nemo", "mistral-small-3.2"])
def strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(write_template_folder(tmp_path_factory.mktemp("t"), TEXTS[request.param]))


def say(said: str) -> list[ChatMessage]:
    ids = {"tool_call_id": "call00001", "name": "find_item"}
    return [ChatMessage(**each, **(ids if each["role"] == "tool" else {})) for each in build(said)]  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["sOne sTwo uThree", "sOne uTwo sThree", "uOne uTwo uThree"])
def test_a_prompt_that_a_strict_template_refuses_says_all_of_it_in_order(strict: ChatTemplate, said: str) -> None:
    text = strict.decode(strict.encode_prompt(say(said), TOOLS))
    places = [text.index(word[1:]) for word in said.split()]
    assert places == sorted(places)


@pytest.mark.parametrize("said", ["sOne uTwo", "uOne sTwo", "uOne uTwo", "tOne uTwo", "tOne sTwo"])
def test_what_follows_an_answer_is_merged_too(strict: ChatTemplate, said: str) -> None:
    text = strict.decode(strict.encode_continuation([], say(said)))
    assert text.index("One") < text.index("Two")


def test_a_template_that_takes_a_conversation_gets_it_as_it_is(tmp_path: Path) -> None:
    template = ChatTemplate(write_template_folder(tmp_path, TEXTS["qwen2.5"]))
    text = template.decode(template.encode_prompt(say("sOne sTwo uThree uFour"), ()))
    assert text.count("<|im_start|>system") == text.count("<|im_start|>user") == 2
