"""Answers to agents over HTTP: three protocols, streamed and not; repetitions; mistakes."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest

from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.sessions import MAX_WAITING, SESSION_OVER
from tests.agents.endpoint_support import (
    ANSWER,
    BODIES,
    CHAT,
    MESSAGES,
    RESPONSES,
    SAID,
    TOOLS,
    answer_next,
    ask,
    each_dialect,
    serving,
)


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
        (MESSAGES, {"thread": {"type": "create"}}, "thread is not supported"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_by_name(path: str, field: dict[str, Any], named: str) -> None:
    async with serving() as (client, _):
        response = await client.post(path, json=BODIES[path] | field)
        assert response.status_code == 400 and named in response.json()["error"]["message"]


async def test_a_client_that_sends_only_what_is_new_is_told_so_by_a_code_that_it_knows() -> None:
    async with serving() as (client, _):
        response = await client.post(MESSAGES, json=BODIES[MESSAGES] | {"thread": {"type": "create"}})
        assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


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
        async with kept.hold_request():
            assert await session.next_call() is kept
            kept.set_answer(ANSWER)
        again = session.enter(AgentCall(messages=SAID), "gone", repetition=True)
        assert again.answer is None and not session.repeated, "it is a call of its own: the one before waits nowhere"


async def test_a_reward_is_taken_once_and_only_if_it_is_a_number() -> None:
    async with serving() as (client, session):
        refused = await client.post("/v1/reward", json={"reward": 1.0})
        assert refused.status_code == 401 and "reward key" in refused.json()["detail"], "the key of its calls is none"
        client.headers["Authorization"] = f"Bearer {session.reward_key}"
        assert (await client.get("/v1/models")).status_code == 401, "nor the other way around"
        for body in (b'{"reward": "high"}', b"{}", b'{"reward": 1, "x": 2}', b"nan"):
            bad = await client.post("/v1/reward", content=body, headers={"Content-Type": "application/json"})
            assert bad.status_code == 400
        assert (await client.post("/v1/reward", json={"reward": 0.5})).status_code == 200
        assert (await client.post("/v1/reward", json={"reward": 1.0})).status_code == 409
        assert session.reward == 0.5
