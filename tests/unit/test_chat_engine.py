"""The engine of servers that take messages: what they are sent, what becomes of their answers, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from fleetbus.core.episode.result_checks import MAX_INT32
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, Image, SamplingSettings, ToolCall, ToolSpec
from fleetbus_workers.inference import chat
from fleetbus_workers.inference.base import EngineFailed, GenerationRequest, RequestRefused
from fleetbus_workers.inference.chat import ChatSampler
from fleetbus_workers.inference.chat_transcript import ChatTranscript, format_answer, read_conversation

pytestmark = pytest.mark.anyio

TEMPLATE = ChatTranscript()
USER = ChatMessage(role="user", content="naïve? <tool_call>")
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
CALL = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
KEY = "sk-proj-0123456789abcdef0123456789abcdef"

Answer = tuple[int, dict[str, Any] | bytes]


def say(content: str | None, *, finish: str = "stop", calls: list[dict[str, Any]] | None = None) -> Answer:
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return 200, {"choices": [{"message": message, "finish_reason": finish}]}


@asynccontextmanager
async def serve(
    answer: Callable[[int], Answer], *, key: str = "", model: str = ""
) -> AsyncIterator[tuple[ChatSampler, list[Any]]]:
    """A sampler of a server that gives the answer of each number, and the bodies that it was sent."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Not to the terminal."""

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "its-model"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            assert self.path == "/v1/chat/completions" and self.headers.get("authorization") == (
                f"Bearer {key}" if key else None
            )
            self.reply(*answer(len(asked)))

        def reply(self, status: int, body: object) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json; charset=zlib_codec")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            sampler = ChatSampler((f"http://127.0.0.1:{server.server_port}",), key=key, model=model, slots=2)
            async with sampler.run():
                await sampler.find_model()
                yield sampler, asked
        finally:
            server.shutdown()
            thread.join()


def request(ids: list[int], *, trained: bool = False, sampling: SamplingSettings | None = None) -> GenerationRequest:
    sampling = sampling or SamplingSettings(max_tokens=20)
    return GenerationRequest(
        cache_key="e", ids=ids, sampling=sampling, stop_ids=frozenset(), max_tokens=20, seed=7, trained=trained
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "FIRST_PAUSE_SECONDS", 0.0)


def test_a_conversation_is_read_back_from_its_ids_as_it_was_said() -> None:
    ids = TEMPLATE.encode_prompt((ChatMessage(role="system", content="Be brief."), USER), (LOOK,))
    ids += TEMPLATE.encode_text(format_answer({"content": "I look.", "tool_calls": [CALL]}))
    ids += TEMPLATE.encode_continuation(
        ids[-1:], (ChatMessage(role="tool", content="a dog", tool_call_id="call00000", name="look"),)
    )
    ids += TEMPLATE.encode_text("A dog.")[:-1]  # cut: its end was not sampled
    ids += TEMPLATE.encode_continuation(ids[-1:], (USER,))
    conversation = read_conversation(ids)
    function = {"name": "look", "arguments": '{"at": "it"}'}
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": USER.content},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "a dog", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": USER.content},
    ]
    assert [tool["function"]["name"] for tool in conversation.tools] == ["look"]
    assert max(ids) < 258 < MAX_INT32


async def test_an_answer_is_text_whose_calls_a_turn_can_read() -> None:
    async with serve(lambda _: say("I look.", calls=[CALL]), key=KEY, model="given") as (sampler, asked):
        sampling = SamplingSettings(max_tokens=20, temperature=0.5, stop=("END",))
        found = await sampler.generate(request(TEMPLATE.encode_prompt((USER,), (LOOK,)), sampling=sampling))
    text = TEMPLATE.decode_text(found.ids)
    parsed = TEMPLATE.parse_text(text, (LOOK,), calls_before=3)
    assert (parsed.content, parsed.calls) == ("I look.", (ToolCall(id="call00003", name="look", arguments={"at": "it"}),))
    assert found.finish_reason == "stop" and all(map(math.isnan, found.logprobs)) and len(found.logprobs) == len(found.ids)
    (body,) = asked
    assert {name: body[name] for name in ("model", "max_tokens", "temperature", "stop")} == {
        "model": "given", "max_tokens": 20, "temperature": 0.5, "stop": ["END"]
    }  # fmt: skip
    assert body["tools"][0]["function"]["parameters"] == LOOK.parameters


async def test_a_server_that_fails_for_a_while_is_asked_again() -> None:
    cut = say("at last", finish="length")
    answers: list[Answer] = [(500, {}), (200, {"choices": []}), (429, {"error": {"message": KEY}}), cut]
    async with serve(lambda number: answers[number - 1]) as (sampler, asked):
        found = await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
    assert (TEMPLATE.decode_text(found.ids), found.finish_reason, len(asked)) == ("at last", "length", 4)
    assert asked[0]["model"] == "its-model", "it was asked for the name"


@pytest.mark.parametrize(
    ("answer", "error", "calls"),
    [
        ((503, {}), EngineFailed, 4),
        ((200, {"choices": [{"message": {"content": ["odd"]}}]}), EngineFailed, 4),
        ((400, {"error": {"message": "too long"}}), RequestRefused, 1),
    ],
)
async def test_an_answer_that_never_comes_is_a_failure_and_no_text(answer: Answer, error: type[Exception], calls: int) -> None:
    async with serve(lambda _: answer) as (sampler, asked):
        with pytest.raises(error):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
    assert len(asked) == calls


async def test_a_model_that_wants_the_limit_by_its_new_name_is_given_it() -> None:
    refusal = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    answers: list[Answer] = [(400, {"error": {"message": refusal}}), say("one"), say("two")]
    async with serve(lambda number: answers[number - 1]) as (sampler, asked):
        for text in ("one", "two"):
            found = await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
            assert TEMPLATE.decode_text(found.ids) == text
    assert [("max_tokens" in body, body.get("max_completion_tokens")) for body in asked] == [
        (True, None),
        (False, 20),
        (False, 20),
    ]


DEEP = "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize(
    "answer",
    [
        (500, DEEP.encode()),
        (500, b"\xff"),
        (200, DEEP.encode()),
        say(None, calls=[{"function": {"name": "look", "arguments": DEEP}}]),
    ],
)
async def test_an_answer_that_cannot_be_decoded_ends_no_worker(answer: Answer) -> None:
    async with serve(lambda _: answer) as (sampler, _):
        with pytest.raises(EngineFailed):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))


@pytest.mark.parametrize("status", [400, 401])
async def test_a_key_that_the_server_repeats_is_not_told(status: int) -> None:
    async with serve(lambda _: (status, {"error": {"message": f"no such key: {KEY}"}}), key=KEY) as (sampler, _):
        with pytest.raises((EngineFailed, RequestRefused), match=r"no such key: \[redacted\]"):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))


async def test_a_key_that_cannot_be_sent_is_not_told() -> None:
    async with serve(lambda _: say("no"), key=f"{KEY}\n", model="given") as (sampler, asked):
        with pytest.raises(EngineFailed) as failed:
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
    assert KEY not in str(failed.value) and not asked


async def test_an_answer_that_fits_no_action_is_refused_once() -> None:
    async with serve(lambda _: say("a" * (chat.MAX_CHARS + 1))) as (sampler, asked):
        with pytest.raises(RequestRefused, match="an Action holds"):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
    assert len(asked) == 1


async def test_an_answer_that_never_ends_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "ANSWER_SECONDS", 0.05)
    ended = Event()

    def wait(_: int) -> Answer:
        ended.wait(20)
        return say("late")

    async with serve(wait) as (sampler, asked):
        with pytest.raises(EngineFailed, match="no whole answer in time"):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ())))
        ended.set()
    assert len(asked) == chat.MAX_TRIES


async def test_what_is_trained_and_what_shows_images_is_refused() -> None:
    image = ChatMessage(role="user", content=(Image(object="0" * 64, media_type="image/png", width=1, height=1),))
    async with serve(lambda _: say("no")) as (sampler, asked):
        with pytest.raises(RequestRefused, match="nothing can be trained"):
            await sampler.generate(request(TEMPLATE.encode_prompt((USER,), ()), trained=True))
        for ids in (TEMPLATE.encode_prompt((image,), ()), [ord("{"), 256], [ord("["), 256]):
            with pytest.raises(RequestRefused, match="cannot be sent"):
                await sampler.generate(request(ids))
    assert not asked


async def test_a_server_that_is_away_at_the_start_is_named() -> None:
    sampler = ChatSampler(("http://127.0.0.1:9",))
    async with sampler.run():
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9"):
            await sampler.find_model()
    with pytest.raises(UserError, match=r"inference\.urls"):
        ChatSampler(())
