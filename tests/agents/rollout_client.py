"""Three conversations at once with one openai client and one key: ``python rollout_client.py WAY TURNS``.

WAY says how they are named: ``header``, ``cache_key``, ``unnamed``, or ``responses``, which continue by `previous_response_id`.
Prints the session of each, as the last answer names it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

SESSION = "x-fleetbus-session"


def name(way: str, number: int) -> dict[str, Any]:
    if way == "header":
        return {"extra_headers": {"X-Session-ID": f"rollout-{number}"}}
    return {"prompt_cache_key": f"rollout-{number}"} if way == "cache_key" else {}


async def converse(client: AsyncOpenAI, way: str, number: int, turns: int) -> str:
    messages: list[Any] = [{"role": "user", "content": "Begin."}]
    session = ""
    for turn in range(turns):
        raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages, **name(way, number))
        said = raw.parse().choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{number}.{turn}"}]
        assert session in ("", raw.headers[SESSION])
        session = raw.headers[SESSION]
    return session


async def respond(client: AsyncOpenAI, number: int, turns: int) -> str:
    previous, session = {}, ""
    for turn in range(turns):
        raw = await client.responses.with_raw_response.create(model="policy", input=f"{number}.{turn}", **previous)
        previous = {"previous_response_id": raw.parse().id}
        assert session in ("", raw.headers[SESSION])
        session = raw.headers[SESSION]
    return session


async def main() -> None:
    way, turns = sys.argv[1], int(sys.argv[2])
    client = AsyncOpenAI()
    plays = [
        respond(client, number, turns) if way == "responses" else converse(client, way, number, turns) for number in range(3)
    ]
    print(json.dumps(await asyncio.gather(*plays)))


if __name__ == "__main__":
    asyncio.run(main())
