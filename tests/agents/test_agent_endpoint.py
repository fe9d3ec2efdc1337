"""What agents are answered over HTTP: three protocols, streamed and not; repetitions; mistakes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer, InvalidCall
from fleetbus_workers.environment.adapters.agent.endpoint import AgentEndpoint
from fleetbus_workers.environment.adapters.agent.sessions import MAX_REQUESTS, MAX_WAITING, SESSION_OVER, AgentSession

CHAT, RESPONSES, MESSAGES = DIALECTS
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
CALL = ToolCall(name="look", arguments={"at": 3}, id="call00000", arguments_text='{"at": 3}')
ANSWER = Answer(number=1, text="Looking.", tool_calls=(CALL,), stop_reason="tool_calls", prompt_tokens=7, sampled_tokens=5)
SAID = (
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="Where?"),
    ChatMessage(role="assistant", content="Hm.", tool_calls=(ToolCall(name="look", arguments={"at": 1}, id="c1"),)),
    ChatMessage(role="tool", content="nothing", tool_call_id="c1"),
)
TOOLS = (ToolSpec(name="look", description="Look there.", parameters=SCHEMA),)
FUNCTION = {"name": "look", "description": "Look there.", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {
                "role": "assistant",
                "content": "Hm.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "Be brief."}],
        "max_tokens": 100,
        "messages": [
            {"role": "user", "content": "Where?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Hm."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "nothing"}]}],
            },
        ],
        "tools": [{"name": "look", "description": "Look there.", "input_schema": SCHEMA}],
    },
}
each_dialect = pytest.mark.parametrize("path", DIALECTS)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[httpx.AsyncClient, AgentSession]]:
    endpoint = AgentEndpoint()
    with anyio.fail_after(50):
        async with endpoint.run():
            with endpoint.open_session() as session:
                headers = {"Authorization": f"Bearer {session.key}"}
                async with httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=40) as client:
                    yield client, session


async def answer_next(session: AgentSession, answer: Answer = ANSWER) -> AgentCall:
    pending = await session.next_call()
    call = pending.call
    pending.set_answer(answer)
    return call


async def ask(client: httpx.AsyncClient, session: AgentSession, path: str, **more: Any) -> tuple[httpx.Response, AgentCall]:
    answers: list[httpx.Response] = []

    async def post() -> None:
        answers.append(await client.post(path, json=BODIES[path] | more))

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        call = await answer_next(session)
    return answers[0], call


@each_dialect
async def test_every_protocol_says_the_same_conversation_and_tools(path: str) -> None:
    async with serving() as (client, session):
        response, call = await ask(client, session, path)
    assert response.status_code == 200
    assert call.messages == SAID and call.tools == TOOLS


async def test_an_answer_stands_where_each_protocol_has_it() -> None:
    async with serving() as (client, session):
        chat = (await ask(client, session, CHAT))[0].json()
        responses = (await ask(client, session, RESPONSES))[0].json()
        messages = (await ask(client, session, MESSAGES))[0].json()
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Looking."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 3}'}
    assert chat["usage"]["total_tokens"] == 12
    assert [item["type"] for item in responses["output"]] == ["message", "function_call"]
    assert responses["output"][1]["arguments"] == '{"at": 3}' and responses["status"] == "completed"
    assert messages["content"][1] == {"type": "tool_use", "id": "call00000", "name": "look", "input": {"at": 3}}
    assert messages["stop_reason"] == "tool_use" and messages["usage"] == {"input_tokens": 7, "output_tokens": 5}


@each_dialect
async def test_a_streamed_answer_says_the_same(path: str) -> None:
    async with serving() as (client, session):
        response, _ = await ask(client, session, path, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text, arguments = read_stream(path, events)
    assert text == "Looking." and json.loads(arguments) == {"at": 3}


def read_stream(path: str, events: list[dict[str, Any]]) -> tuple[str, str]:
    if path == CHAT:
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        return text, "".join(call["function"]["arguments"] for call in calls)
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed" and len(events[-1]["response"]["output"]) == 2
        named = {kind: "".join(event["delta"] for event in events if event["type"].endswith(kind)) for kind in ENDINGS}
        return named["output_text.delta"], named["arguments.delta"]
    assert events[-1]["type"] == "message_stop"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(d.get("text", "") for d in deltas), "".join(d.get("partial_json", "") for d in deltas)


ENDINGS = ("output_text.delta", "arguments.delta")


@pytest.mark.parametrize("way", ["bearer", "x-api-key", "path"])
async def test_the_key_is_taken_as_bearer_header_or_in_the_path(way: str) -> None:
    async with serving() as (client, session):
        headers = {"bearer": {"Authorization": f"Bearer {session.key}"}, "x-api-key": {"x-api-key": session.key}}.get(way, {})
        prefix = f"/s/{session.key}" if way == "path" else ""
        async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as other:
            assert (await other.get(f"{prefix}/v1/models")).json()["data"][0]["id"] == "policy"
            counted = await other.post(f"{prefix}/v1/messages/count_tokens", json={"messages": []})
            assert counted.json()["input_tokens"] > 0


@each_dialect
async def test_without_the_key_of_a_session_nothing_is_answered(path: str) -> None:
    async with serving() as (client, session):
        headers = {"Authorization": "Bearer other", "x-session-id": session.key}
        response = await client.post(path, json=BODIES[path], headers=headers)
        assert response.status_code == 401 and "session" in json.dumps(response.json()["error"])


@pytest.mark.parametrize(
    ("path", "field", "named"),
    [
        (CHAT, {"n": 2}, "n is not supported"),
        (CHAT, {"tool_choice": "required"}, "tool_choice is not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format is not supported"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        (CHAT, {"messages": "x"}, "list of objects"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "type 'web_search'"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice is not supported"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only custom tools"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_by_name(path: str, field: dict[str, Any], named: str) -> None:
    async with serving() as (client, _):
        response = await client.post(path, json=BODIES[path] | field)
        assert response.status_code == 400 and named in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"nul", b'"x"', b"[" * 300_000, b"[" + b"[]," * 300_000])
@each_dialect
async def test_a_body_that_is_no_object_is_refused(path: str, body: bytes) -> None:
    async with serving() as (client, _):
        response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400


async def test_a_marked_repetition_joins_its_call_and_gets_the_same_answer() -> None:
    async with serving() as (client, session):
        texts: list[str] = []

        async def post(retry: int) -> None:
            response = await client.post(CHAT, json=BODIES[CHAT], headers={"x-stainless-retry-count": str(retry)})
            texts.append(response.text)

        async with anyio.create_task_group() as group:
            group.start_soon(post, 0)
            pending = await session.next_call()
            group.start_soon(post, 1)
            while not session.repeated:  # noqa: ASYNC110 - nothing tells of a request that joins
                await anyio.sleep(0.01)
            pending.set_answer(ANSWER)
        await post(2)
        assert len(texts) == 3 and len(set(texts)) == 1 and session.repeated == 2


async def test_a_request_that_its_repetition_overtook_is_the_same_call() -> None:
    async with serving() as (client, session):
        async with anyio.create_task_group() as group:
            group.start_soon(answer_next, session)
            marked = await client.post(CHAT, json=BODIES[CHAT], headers={"x-stainless-retry-count": "1"})
        assert (await client.post(CHAT, json=BODIES[CHAT])).text == marked.text and session.repeated == 1
        await ask(client, session, CHAT)  # the next one is another sample
        assert session.repeated == 1


async def test_the_same_body_without_a_mark_is_another_sample() -> None:
    async with serving() as (client, session):
        await ask(client, session, CHAT)
        await ask(client, session, CHAT)
        assert session.repeated == 0


async def test_the_end_of_a_session_answers_all_its_calls_with_words() -> None:
    async with serving() as (client, session):
        async with anyio.create_task_group() as group:
            texts: list[str] = []

            async def post() -> None:
                texts.append((await client.post(CHAT, json=BODIES[CHAT])).json()["choices"][0]["message"]["content"])

            group.start_soon(post)
            group.start_soon(post)
            await session.next_call()
            session.end()
        await post()
        assert texts == [SESSION_OVER] * 3


async def test_more_calls_at_a_time_than_a_session_holds_are_told_to_come_later() -> None:
    async with serving() as (client, session):
        for number in range(MAX_WAITING):
            session.enter(AgentCall(messages=SAID), str(number), repetition=False)
        response = await client.post(MESSAGES, json=BODIES[MESSAGES])
        assert response.status_code == 429 and response.headers["retry-after"]
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_a_call_whose_client_went_away_is_not_played() -> None:
    async with serving() as (_, session):
        session.enter(AgentCall(messages=SAID), "gone", repetition=False)
        kept = session.enter(AgentCall(messages=SAID), "kept", repetition=False)
        async with kept.wanted():
            assert await session.next_call() is kept
            kept.set_answer(ANSWER)
        again = session.enter(AgentCall(messages=SAID), "gone", repetition=True)
        assert again.answer is None and not session.repeated, "it is a call of its own: the one before waits nowhere"


async def test_a_reward_is_taken_once_and_only_if_it_is_a_number() -> None:
    async with serving() as (client, session):
        for body in (b'{"reward": "high"}', b"{}", b'{"reward": 1, "x": 2}', b"nan"):
            bad = await client.post("/v1/reward", content=body, headers={"Content-Type": "application/json"})
            assert bad.status_code == 400
        assert (await client.post("/v1/reward", json={"reward": 0.5})).status_code == 200
        assert (await client.post("/v1/reward", json={"reward": 1.0})).status_code == 409
        assert session.reward == 0.5


async def test_a_page_of_another_site_is_refused() -> None:
    async with serving() as (client, _):
        response = await client.post(CHAT, json=BODIES[CHAT], headers={"Origin": "https://evil.example"})
        assert response.status_code == 403


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/messages/count_tokens", "/v1/reward"])
async def test_a_body_beyond_the_limit_is_refused_before_all_of_it_is_read(path: str) -> None:
    async with serving() as (client, _):
        response = await client.post(path, content=b"x" * (10 << 20), headers={"Content-Type": "application/json"})
        assert response.status_code == 413


@pytest.mark.parametrize("arguments", [f'{{"a": {"9" * 400}}}', '{"a": "\\ud800"}', '{"\\ud800": 1}'])
async def test_what_no_log_can_hold_is_refused(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    async with serving() as (client, _):
        response = await client.post(CHAT, json={"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
        assert response.status_code == 400 and "cannot be stored" in response.json()["error"]["message"]


async def test_repetitions_are_bounded_too() -> None:
    async with serving() as (client, session):
        statuses: list[int] = []

        async def post() -> None:
            response = await client.post(CHAT, json=BODIES[CHAT], headers={"x-stainless-retry-count": "1"})
            statuses.append(response.status_code)
            if statuses.count(429) == 200 - MAX_REQUESTS:
                session.end()

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=40, limits=limits) as client:
            async with anyio.create_task_group() as group:
                for _ in range(200):
                    group.start_soon(post)
        assert (statuses.count(429), statuses.count(200)) == (200 - MAX_REQUESTS, MAX_REQUESTS)
        assert session.requests == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_went_away_finds_its_call_when_it_comes_again(stream: bool) -> None:
    async with serving() as (client, session):
        body = BODIES[CHAT] | {"stream": stream}
        with anyio.move_on_after(0.3):
            await client.post(CHAT, json=body)
        async with anyio.create_task_group() as group:
            answers: list[str] = []

            async def post() -> None:
                answers.append((await client.post(CHAT, json=body, headers={"x-stainless-retry-count": "1"})).text)

            group.start_soon(post)
            while not session.repeated:  # noqa: ASYNC110 - nothing tells of a request that joins
                await anyio.sleep(0.01)
            (await session.next_call()).set_answer(ANSWER)
        assert "Looking." in answers[0]
        with anyio.move_on_after(0.1) as waiting:
            await session.next_call()
        assert waiting.cancelled_caught, "one call was played"


async def test_a_body_that_changed_is_no_repetition_whatever_its_headers_say() -> None:
    async with serving() as (client, session):
        headers = {"x-stainless-retry-count": "3", "Idempotency-Key": "k"}
        client.headers.update(headers)
        await ask(client, session, CHAT)
        other = Answer(number=2, text="Other.")
        async with anyio.create_task_group() as group:
            group.start_soon(answer_next, session, other)
            response = await client.post(CHAT, json=BODIES[CHAT] | {"temperature": 0})
        assert "Other." in response.text and session.repeated == 0


@each_dialect
async def test_a_call_that_a_turn_cannot_hold_is_refused_in_a_stream_too(path: str) -> None:
    async with serving() as (client, session):
        for stream in (False, True):
            async with anyio.create_task_group() as group:
                responses: list[httpx.Response] = []

                async def post(stream: bool = stream, responses: list[httpx.Response] = responses) -> None:
                    responses.append(await client.post(path, json=BODIES[path] | {"stream": stream}))

                group.start_soon(post)
                (await session.next_call()).set_answer(InvalidCall("too long"))
            assert "too long" in responses[0].text and responses[0].status_code == (200 if stream else 400)


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 4\r\nContent-Length: 5",
        "Transfer-Encoding: gzip, chunked",
        "Content-Length: 4\r\nX-Api-Key : other",
        "Content-Length: 4\r\n X-Api-Key: other",
        "Host: evil\r\nContent-Length: 4",
    ],
)
async def test_a_request_that_two_readers_would_read_differently_opens_nothing(head: str) -> None:
    async with serving() as (client, session):
        async with await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as stream:
            start = f"POST /s/{session.key}/v1/reward HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n"
            hidden = f'POST /s/{session.key}/v1/reward HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 13\r\n\r\n{{"reward": 1}}'
            await stream.send((start + "0\r\n\r\n" + hidden).encode())
            answer = await stream.receive()
        assert answer.startswith(b"HTTP/1.1 4"), answer
        assert not session.is_graded


@pytest.mark.parametrize(
    "path", ["/s/{key}/../../v1/models", "/s/%2e%2e/v1/models", "//v1/models", "/s//v1/models", "/s/{key}%00/v1/models"]
)
async def test_no_path_leads_around_the_key(path: str) -> None:
    async with serving() as (client, session):
        async with await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as stream:
            await stream.send(f"GET {path.format(key=session.key)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            answer = await stream.receive()
        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404")), answer


async def test_where_a_verifier_grades_the_agent_does_not() -> None:
    endpoint = AgentEndpoint()
    async with endpoint.run():
        with endpoint.open_session(takes_reward=False) as session:
            async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-api-key": session.key}) as client:
                response = await client.post("/v1/reward", json={"reward": 1})
    assert response.status_code == 403 and not session.is_graded
