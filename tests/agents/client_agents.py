"""One small agent per client that people use, each with that client's own loop: call `look` as often as asked, then answer.

``python client_agents.py NAME``; the tool gives ten times its number, and the agent's reward is 1 if its answer is "30". With
``faulty`` behind it the way to the endpoint is (`faulty_proxy`), and a refused key has to come out as the client's own error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

PROMPT = "Look at 1 and 2 and say the sum."
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"], "additionalProperties": False}
DESCRIPTION = "Look there."
called: list[int] = []


def look(at: int) -> str:
    """Look there.

    Args:
        at: where
    """
    called.append(at)
    return str(10 * at)


def openai_chat(*, stream: bool = False) -> str:
    from openai import OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": PROMPT}]
    tools = [{"type": "function", "function": {"name": "look", "description": DESCRIPTION, "parameters": SCHEMA}}]
    while True:
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def openai_chat_streamed() -> str:
    return openai_chat(stream=True)


def openai_responses(*, stream: bool = False) -> str:
    from openai import OpenAI

    client, items = OpenAI(), [{"role": "user", "content": PROMPT}]
    tools = [{"type": "function", "name": "look", "description": DESCRIPTION, "parameters": SCHEMA}]
    while True:
        if stream:
            with client.responses.stream(model="policy", input=items, tools=tools) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(model="policy", input=items, tools=tools)
        kept = [item.model_dump(exclude_none=True) for item in response.output]
        items += [{key: value for key, value in item.items() if key != "parsed_arguments"} for item in kept]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            output = look(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def openai_responses_streamed() -> str:
    return openai_responses(stream=True)


def anthropic_messages(*, stream: bool = False) -> str:
    from anthropic import Anthropic

    client = Anthropic()
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    options = {"tools": [{"name": "look", "description": DESCRIPTION, "input_schema": SCHEMA}], "max_tokens": 100}
    while True:
        if stream:
            with client.messages.stream(model="policy", messages=messages, **options) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(model="policy", messages=messages, **options)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[0].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def anthropic_messages_streamed() -> str:
    return anthropic_messages(stream=True)


def google_genai(*, stream: bool = False) -> str:
    from google.genai import Client, types

    client = Client(http_options=types.HttpOptions(retry_options=types.HttpRetryOptions(attempts=4)))
    chat = client.chats.create(model="policy", config=types.GenerateContentConfig(tools=[look]))
    if not stream:
        return str(chat.send_message(PROMPT).text)
    return "".join(event.text or "" for event in chat.send_message_stream(PROMPT)).removeprefix("I look.")


def google_genai_streamed() -> str:
    return google_genai(stream=True)


def litellm() -> str:
    import litellm

    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    tools = [{"type": "function", "function": {"name": "look", "description": DESCRIPTION, "parameters": SCHEMA}}]
    while True:
        message = litellm.completion("openai/policy", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def openai_agents(*, stream: bool = False) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="looker", instructions="Be brief.", tools=[function_tool(look)], model="policy")
    if not stream:
        return Runner.run_sync(agent, PROMPT).final_output

    async def run() -> str:
        result = Runner.run_streamed(agent, PROMPT)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def openai_agents_streamed() -> str:
    return openai_agents(stream=True)


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy"), [look])
    return agent.invoke({"messages": [{"role": "user", "content": PROMPT}]})["messages"][-1].content


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    return Agent(OpenAIChatModel("policy"), tools=[look]).run_sync(PROMPT).output


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAIServerModel("policy", api_base=url, api_key=key, tool_choice="auto")  # it forces a tool otherwise
    return str(ToolCallingAgent([tool(look)], model, verbosity_level=0).run(PROMPT))


AGENTS: dict[str, Callable[[], str]] = {
    agent.__name__: agent
    for agent in (
        openai_chat,
        openai_chat_streamed,
        openai_responses,
        openai_responses_streamed,
        anthropic_messages,
        anthropic_messages_streamed,
        google_genai,
        google_genai_streamed,
        litellm,
        openai_agents,
        openai_agents_streamed,
        langgraph,
        pydantic_ai,
        smolagents,
    )
}

REPEATS_NO_LOST = ("google_genai", "google_genai_streamed")
"""Clients that raise when a connection breaks."""

if __name__ == "__main__":
    proxy = None
    if sys.argv[2:] == ["faulty"]:
        from faulty_proxy import FaultyProxy

        proxy = FaultyProxy()
        proxy.loses_answer = sys.argv[1] not in REPEATS_NO_LOST
    answer = AGENTS[sys.argv[1]]()
    right = answer.strip() == "30" and sorted(called) == [1, 2]
    if proxy is not None:
        proxy.spoils_keys = True
        try:
            AGENTS[sys.argv[1]]()
            right = False
        except Exception as error:
            right = right and "belongs to no running session" in f"{error!r} {error}"
    body = json.dumps({"reward": float(right)}).encode()
    request = urllib.request.Request(os.environ["FLEETBUS_REWARD_URL"], body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).close()
