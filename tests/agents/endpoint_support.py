"""An endpoint for agents with one session, the same call in each protocol, and its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer
from fleetbus_workers.environment.adapters.agent.endpoint import AgentEndpoint
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession

CHAT, RESPONSES, MESSAGES, *_ = DIALECTS
GEMINI, GEMINI_STREAMED = (f"/v1beta/models/policy:{method}" for method in ("generateContent", "streamGenerateContent"))
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
GOOGLE_SCHEMA = {"type": "OBJECT", "properties": {"at": {"type": "INTEGER"}}}
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
    GEMINI: {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Where?"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"text": "Hm."},
                    {"functionCall": {"id": "c1", "name": "look", "args": {"at": 1}}, "thoughtSignature": "eA=="},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"output": "nothing"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "look", "description": "Look there.", "parameters": GOOGLE_SCHEMA}]}],
    },
}
each_dialect = pytest.mark.parametrize("path", BODIES)


@asynccontextmanager
async def serving(seconds: float = 50) -> AsyncIterator[tuple[httpx.AsyncClient, AgentSession]]:
    """For at most so long: a client in a process of its own first loads an SDK, for minutes on a machine that is busy."""
    endpoint = AgentEndpoint()
    with anyio.fail_after(seconds):
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


def find_address(path: str, stream: bool) -> str:
    """One protocol says in its path whether an answer is streamed."""
    return GEMINI_STREAMED if path == GEMINI and stream else path


async def ask(client: httpx.AsyncClient, session: AgentSession, path: str, **more: Any) -> tuple[httpx.Response, AgentCall]:
    answers: list[httpx.Response] = []

    async def post() -> None:
        answers.append(await client.post(find_address(path, more.get("stream") is True), json=BODIES[path] | more))

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        call = await answer_next(session)
    return answers[0], call
