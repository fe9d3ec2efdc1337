"""Bounds and refusals of the endpoint, for an agent that means ill or a client that breaks off."""

from __future__ import annotations

import anyio
import httpx
import pytest

from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import Answer, InvalidCall
from fleetbus_workers.environment.adapters.agent.endpoint import AgentEndpoint
from fleetbus_workers.environment.adapters.agent.sessions import MAX_REQUESTS
from tests.agents.endpoint_support import ANSWER, BODIES, CHAT, answer_next, ask, each_dialect, find_address, serving


async def test_a_page_of_another_site_is_refused() -> None:
    async with serving() as (client, _):
        response = await client.post(CHAT, json=BODIES[CHAT], headers={"Origin": "https://evil.example"})
        assert response.status_code == 403


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/messages/count_tokens", "/v1/reward"])
async def test_a_body_beyond_the_limit_is_refused_before_all_of_it_is_read(path: str) -> None:
    async with serving() as (client, session):
        key = session.reward_key if path.endswith("reward") else session.key
        headers = {"Content-Type": "application/json", "x-api-key": key}
        response = await client.post(path, content=b"x" * (10 << 20), headers=headers)
        assert response.status_code == 413


@pytest.mark.parametrize("arguments", [f'{{"a": {"9" * 400}}}', '{"a": "\\ud800"}', '{"\\ud800": 1}'])
async def test_what_no_log_can_hold_is_refused(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    async with serving() as (client, _):
        response = await client.post(CHAT, json={"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
        assert response.status_code == 400 and "cannot be stored" in response.json()["error"]["message"]


@pytest.mark.integration
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
                    responses.append(await client.post(find_address(path, stream), json=BODIES[path] | {"stream": stream}))

                group.start_soon(post)
                (await session.next_call()).set_answer(InvalidCall("too long"))
            assert "too long" in responses[0].text and responses[0].status_code == 400


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
            line = f"POST /s/{session.reward_key}/v1/reward HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            start, hidden = f"{line}{head}\r\n\r\n", f'{line}Content-Length: 13\r\n\r\n{{"reward": 1}}'
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
            async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-api-key": session.reward_key}) as client:
                response = await client.post("/v1/reward", json={"reward": 1})
    assert response.status_code == 403 and not session.is_graded
