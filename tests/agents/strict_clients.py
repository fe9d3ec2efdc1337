"""Every answer of the endpoint, parsed by the SDKs' own types without leniency: ``python strict_clients.py NAME URL KEY``.

Prints what was not parsed and ends with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

QUESTION = [{"role": "user", "content": "Where?"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
MODEL = "policy"


def openai(url: str, key: str) -> Iterator[object]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key, _strict_response_validation=True, max_retries=0)
    chat: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    options = {"model": MODEL, "messages": QUESTION, "tools": [chat]}
    yield client.chat.completions.create(**options)
    yield from client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    tools: list[Any] = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    yield client.responses.create(model=MODEL, input=QUESTION, tools=tools)
    yield from client.responses.create(model=MODEL, input=QUESTION, tools=tools, stream=True)
    yield client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    yield from client.models.list()
    yield client.models.retrieve(MODEL)


def openresponses(url: str, key: str) -> Iterator[object]:
    import httpx
    from openresponses_types import types

    body = {"model": MODEL, "input": QUESTION}
    answer = httpx.post(f"{url}/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)
    yield types.ResponseResource.model_validate(answer.json())


def anthropic(url: str, key: str) -> Iterator[object]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=key, _strict_response_validation=True, max_retries=0)
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    yield client.messages.create(**options, max_tokens=100)
    yield from client.messages.create(**options, max_tokens=100, stream=True)
    yield client.messages.count_tokens(**options)
    yield from client.models.list()
    yield client.models.retrieve(MODEL)


def google_genai(url: str, key: str) -> Iterator[object]:
    from google.genai import Client, types

    client = Client(api_key=key, http_options=types.HttpOptions(base_url=url))
    declared = types.FunctionDeclaration(name="look", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
    yield client.models.generate_content(model=MODEL, contents="Where?", config=config)
    yield from client.models.generate_content_stream(model=MODEL, contents="Where?", config=config)
    yield client.models.count_tokens(model=MODEL, contents="Where?")
    yield from client.models.list()
    yield client.models.get(model=MODEL)


CLIENTS: dict[str, Callable[[str, str], Iterator[object]]] = {
    client.__name__: client for client in (openai, openresponses, anthropic, google_genai)
}


def find_wrong(parsed: Any) -> str:
    """A wrong part of what was parsed leniently all the same; empty if all is as the type says."""
    try:
        type(parsed).model_validate(parsed.model_dump(by_alias=True, warnings="error"))
    except Exception as error:  # pydantic's own errors, of each SDK's version
        return f"{type(parsed).__name__}: {error}"
    return ""


if __name__ == "__main__":
    name, url, key = sys.argv[1:]
    wrong = [problem for parsed in CLIENTS[name](url, key) if (problem := find_wrong(parsed))]
    print("\n".join(wrong))
    sys.exit(bool(wrong))
