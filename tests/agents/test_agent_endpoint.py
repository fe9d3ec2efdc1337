"""Answers to agents over HTTP: four protocols, streamed and not; repetitions; mistakes."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import structlog.testing

from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.sessions import MAX_WAITING, SESSION_OVER
from tests.agents.endpoint_support import (
    ANSWER,
    BODIES,
    CALL,
    CHAT,
    FUNCTION,
    GEMINI,
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
    assert tuple(msgspec.structs.replace(message, name="") for message in call.messages) == SAID and call.tools == TOOLS


async def test_an_answer_stands_where_each_protocol_has_it() -> None:
    async with serving() as (client, session):
        chat = (await ask(client, session, CHAT))[0].json()
        responses = (await ask(client, session, RESPONSES))[0].json()
        messages = (await ask(client, session, MESSAGES))[0].json()
        gemini = (await ask(client, session, GEMINI))[0].json()
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Looking."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 3}'}
    assert chat["usage"]["total_tokens"] == 12
    assert [item["type"] for item in responses["output"]] == ["message", "function_call"]
    assert responses["output"][1]["arguments"] == '{"at": 3}' and responses["status"] == "completed"
    assert messages["content"][1] == {"type": "tool_use", "id": "call00000", "name": "look", "input": {"at": 3}}
    assert messages["stop_reason"] == "tool_use" and messages["usage"] == {"input_tokens": 7, "output_tokens": 5}
    (candidate,) = gemini["candidates"]
    call = {"functionCall": {"id": "call00000", "name": "look", "args": {"at": 3}}}
    assert candidate["content"] == {"role": "model", "parts": [{"text": "Looking."}, call]}
    assert candidate["finishReason"] == "STOP" and gemini["usageMetadata"]["totalTokenCount"] == 12


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
    if path == GEMINI:
        ((text, call),) = [event["candidates"][0]["content"]["parts"] for event in events]
        return text["text"], json.dumps(call["functionCall"]["args"])
    assert events[-1]["type"] == "message_stop"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(d.get("text", "") for d in deltas), "".join(d.get("partial_json", "") for d in deltas)


ENDINGS = ("output_text.delta", "arguments.delta")


@pytest.mark.parametrize("way", ["bearer", "x-api-key", "x-goog-api-key", "path"])
async def test_the_key_is_taken_as_bearer_header_or_in_the_path(way: str) -> None:
    async with serving() as (client, session):
        headers = {"Authorization": f"Bearer {session.key}"} if way == "bearer" else {way: session.key}
        headers = {} if way == "path" else headers
        prefix = f"/s/{session.key}" if way == "path" else ""
        async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as other:
            assert (await other.get(f"{prefix}/v1/models")).json()["data"][0]["id"] == "policy"
            counted = await other.post(f"{prefix}/v1/messages/count_tokens", json={"messages": []})
            assert counted.json()["input_tokens"] > 0


async def test_what_a_client_asks_of_models_and_counts_is_answered_on_every_path() -> None:
    async with serving() as (client, _):
        for path in ("/v1/models", "/v1/models/policy", "/v1beta/models", "/v1beta/models/policy"):
            assert "policy" in (await client.get(path)).text, path
        for path, field in COUNTED.items():
            counted = await client.post(path, json={"contents": [], "messages": []})
            assert counted.status_code == 200 and counted.json()[field] > 0, path
            refused = await client.post(path, json={}, headers={"Authorization": "Bearer other"})
            assert refused.status_code == 401 and "session" in refused.json()["error"]["message"]


COUNTED = {
    "/v1/messages/count_tokens": "input_tokens",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1beta/models/policy:countTokens": "totalTokens",
    "/v1/models/policy:countTokens": "totalTokens",
}


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
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice names fly"),
        (CHAT, {"tool_choice": {"type": "custom"}}, "tool_choice is not supported"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format is of the type 'xml'"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        (CHAT, {"messages": "x"}, "list of objects"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "no response of this session"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "names the item 'x', which is of no response"),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format is of the type 'grammar'"),
        (MESSAGES, {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice names a tool"),
        (MESSAGES, {"output_format": {"type": "text"}}, "type json_schema"),
        (MESSAGES, {"thread": {"type": "create"}}, "thread is not supported"),
        (GEMINI, {"generationConfig": {"candidateCount": 2}}, "candidateCount is not supported"),
        (GEMINI, {"generation_config": {"response_mime_type": "text/x.enum"}}, "responseMimeType is not supported"),
        (GEMINI, {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "mode is not supported"),
        (GEMINI, {"cachedContent": "cachedContents/1"}, "cachedContent is not supported"),
        (GEMINI, {"contents": [{"role": "robot", "parts": []}]}, "role 'robot'"),
        (GEMINI, {"contents": [{"parts": [{"inlineData": {"data": "eA=="}}]}]}, "a part with inlineData"),
        (GEMINI, {"contents": []}, "contents is empty"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_by_name(path: str, field: dict[str, Any], named: str) -> None:
    async with serving() as (client, _):
        response = await client.post(path, json=BODIES[path] | field)
        assert response.status_code == 400 and named in response.json()["error"]["message"]


VENDORS_TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "custom", "custom": {"name": "grep"}}],
    RESPONSES: [{"type": "web_search"}, {"type": "image_generation"}],
    MESSAGES: [{"type": "bash_20250124", "name": "bash"}],
    GEMINI: [{"googleSearch": {}}],
}


@each_dialect
async def test_tools_that_only_their_vendor_runs_are_left_out_and_logged_once(path: str) -> None:
    more = VENDORS_TOOLS[path]
    async with serving() as (client, session):
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                response, call = await ask(client, session, path, tools=[*BODIES[path]["tools"], *more])
                assert response.status_code == 200 and call.tools == TOOLS
    (entry,) = [entry for entry in logs if "kinds" in entry]
    assert len(entry["kinds"]) == len(more)


def place_image(path: str) -> dict[str, Any]:
    """The body of each protocol whose tool gave an image beside its text."""
    body: dict[str, Any] = json.loads(json.dumps(BODIES[path]))
    if path == CHAT:
        body["messages"][-1]["content"] = [
            {"type": "text", "text": "nothing"},
            {"type": "image_url", "image_url": {"url": "x"}},
        ]
    elif path == RESPONSES:
        body["input"][-1]["output"] = [{"type": "input_text", "text": "nothing"}, {"type": "input_image", "image_url": "x"}]
    elif path == MESSAGES:
        body["messages"][-1]["content"][0]["content"].append({"type": "image", "source": {"type": "base64", "data": "x"}})
    else:
        body["contents"][-1]["parts"][0]["functionResponse"]["parts"] = [{"inlineData": {"data": "x"}}]
    return body


@each_dialect
async def test_an_image_that_a_tool_gave_is_named_in_its_place_and_the_agent_goes_on(path: str) -> None:
    async with serving() as (client, session):
        response, call = await ask(client, session, path, **place_image(path))
    assert response.status_code == 200
    said = str(call.messages[-1].content)
    assert said.startswith("nothing\n[") and said.endswith("left out: only text is supported here]")


async def test_an_image_beside_the_result_that_gave_it_is_the_tools_as_gemini_cli_sends_it() -> None:
    body = json.loads(json.dumps(BODIES[GEMINI]))
    body["contents"][-1]["parts"].append({"inlineData": {"mimeType": "image/png", "data": "eA=="}})
    async with serving() as (client, session):
        response, call = await ask(client, session, GEMINI, **body)
    assert response.status_code == 200
    assert call.messages[-1].content == "[inlineData left out: only text is supported here]"


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


async def test_tools_of_a_namespace_are_offered_and_called_by_their_own_names() -> None:
    inner = {"type": "function", **FUNCTION}
    tools = [{"type": "namespace", "name": "mcp__places", "description": "Places.", "tools": [inner]}]
    called = {"type": "function_call", "call_id": "c1", "namespace": "mcp__places", "name": "look", "arguments": "{}"}
    said = [{"role": "user", "content": "Where?"}, called, {"type": "function_call_output", "call_id": "c1", "output": "10"}]
    offered = msgspec.structs.replace(CALL, name="mcp__places.look")
    answer = msgspec.structs.replace(ANSWER, tool_calls=(offered,))
    async with serving() as (client, session), anyio.create_task_group() as group:
        responses: list[httpx.Response] = []

        async def post() -> None:
            responses.append(await client.post(RESPONSES, json={"input": said, "tools": tools}))

        group.start_soon(post)
        call = await answer_next(session, answer)
    assert [tool.name for tool in call.tools] == ["mcp__places.look"]
    assert call.messages[1].tool_calls[0].name == "mcp__places.look"
    item = responses[0].json()["output"][1]
    assert (item["namespace"], item["name"]) == ("mcp__places", "look")
    assert not session.left_out
