"""One key for many conversations: `POST /sessions` with ``rollouts``, on a real server, by the openai client too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import httpx
import pytest

from fleetbus.audit.run import audit_run
from fleetbus_schemas import ChatMessage, EpisodeFinished, EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, InvalidCall
from fleetbus_workers.gateway.rollouts import Parent, Rollouts
from tests.agents.gateway_support import SUBJECTS, Run, bearer, find_port, grader, read_text, running, say, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.integration]

CLIENT = Path(__file__).with_name("rollout_client.py")
PYTHON = os.environ.get("AGENTS_PYTHON", "")
TURNS = 3


async def open_parent(client: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    answer = await client.post("/sessions", json={"task": {"key": "mine", "prompt": "p"}, "rollouts": 3} | wanted)
    assert answer.status_code == 201, answer.text
    parent: dict[str, Any] = answer.json()
    return parent


async def list_rollouts(client: httpx.AsyncClient, parent: dict[str, Any], **params: str) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {parent['rollouts_key']}"}
    answer = await client.get(f"/sessions/{parent['id']}/rollouts", headers=headers, params=params)
    assert answer.status_code == 200, answer.text
    rollouts: list[dict[str, Any]] = answer.json()["rollouts"]
    return rollouts


async def grade_all(client: httpx.AsyncClient, run: Run, rollouts: list[dict[str, Any]]) -> list[EpisodeFinished]:
    """Post a reward of its own for each rollout; returns their results."""
    for number, rollout in enumerate(rollouts):
        path = f"/sessions/{rollout['id']}/reward"
        posted = await client.post(path, json={"reward": number / 10}, headers=grader(rollout))
        assert posted.json()["reward"] == number / 10, posted.text
    return [await run.result(rollout["id"]) for rollout in rollouts]


def name_by_nothing(number: int) -> dict[str, Any]:
    return {}


def name_by_header(number: int) -> dict[str, Any]:
    return {"headers": {"X-Session-ID": f"rollout-{number}"}}


def name_by_body(number: int) -> dict[str, Any]:
    return {"body": {"prompt_cache_key": f"rollout-{number}"}}


def name_by_path(number: int) -> dict[str, Any]:
    return {"path": f"/r/rollout-{number}"}


@pytest.mark.parametrize("name", [name_by_header, name_by_body, name_by_path, name_by_nothing])
async def test_three_conversations_side_by_side_under_one_key_are_three_episodes(name: Any, tmp_path: Path) -> None:
    """They begin with the same words, as the rollouts of one task do."""
    async with running(tmp_path) as run, run.gateway() as client:
        parent = await open_parent(client)

        async def converse(number: int) -> None:
            way = name(number)
            messages = [{"role": "user", "content": "Begin."}]
            for turn in range(TURNS):
                body = {"model": "policy", "messages": messages} | way.get("body", {})
                path = f"/s/{parent['key']}{way.get('path', '')}/v1/chat/completions"
                answer = await client.post(path, json=body, headers=way.get("headers", {}))
                messages += [
                    {"role": "assistant", "content": read_text(answer)},
                    {"role": "user", "content": f"{number}.{turn}"},
                ]

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(converse, number)
        results = await grade_all(client, run, rollouts := await list_rollouts(client, parent))
        assert [(result.turns, result.segments, result.reward) for result in results] == [
            (TURNS, (), number / 10) for number in range(3)
        ]
        assert name is name_by_nothing or {rollout["name"] for rollout in rollouts} == {f"rollout-{n}" for n in range(3)}
        report = await audit_run(run.bus, SUBJECTS)
        assert report.balanced, report.findings


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`")
@pytest.mark.parametrize("way", ["header", "cache_key", "responses", "unnamed"])
async def test_the_openai_client_plays_three_rollouts_with_one_key(way: str, tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        parent = await open_parent(client)
        variables = os.environ | {"OPENAI_BASE_URL": parent["openai_base_url"], "OPENAI_API_KEY": parent["key"]}
        with anyio.fail_after(120):
            done = await anyio.run_process([PYTHON, str(CLIENT), way, str(TURNS)], env=variables, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        sessions = json.loads(done.stdout)
        rollouts = await list_rollouts(client, parent)
        assert sorted(sessions) == sorted(rollout["id"] for rollout in rollouts) and len(set(sessions)) == 3
        results = await grade_all(client, run, rollouts)
        assert [(result.turns, result.segments) for result in results] == [(TURNS, ())] * 3
        report = await audit_run(run.bus, SUBJECTS)
        assert report.balanced, report.findings


async def test_a_key_opens_no_more_rollouts_than_it_says_and_is_no_key_of_a_session(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        for wrong in (
            {"rollouts": 0},
            {"rollouts": 1 << 20},
            {"purpose": "train"},
            {"task": {"key": "k", "prompt": "p" * 4000}},
            {"task": {"key": "k", "prompt": "p", "env_variables": {"TOKEN": "agents could read it"}}},
        ):
            asked = {"task": {"key": "mine", "prompt": "p"}, "rollouts": 2} | wrong
            assert (await client.post("/sessions", json=asked)).status_code == 400, wrong
        parent = await open_parent(client, rollouts=2)
        for number in range(2):
            read_text(await say(client, parent, "one", **{"X-Session-ID": str(number)}))
        third = await say(client, parent, "one", **{"X-Session-ID": "2"})
        assert third.status_code == 400 and "opened its 2 rollouts" in third.json()["error"]["message"]
        assert (await say(client, parent, "one", **{"X-Session-ID": "x" * 300})).status_code == 400
        forged = {"key": parent["key"][:-1] + ("0" if parent["key"][-1] != "0" else "1")}
        assert (await say(client, forged, "one", **{"X-Session-ID": "0"})).status_code == 401
        assert (await client.get("/v1/models", headers=bearer(parent))).status_code == 200
        (first, _) = await list_rollouts(client, parent)
        for key in (parent["key"], parent["rollouts_key"], first["reward_key"]):
            headers = {"Authorization": f"Bearer {key}"}
            if key != parent["rollouts_key"]:
                assert (await client.get(f"/sessions/{parent['id']}/rollouts", headers=headers)).status_code == 401
            if key != first["reward_key"]:
                posted = await client.post(f"/sessions/{first['id']}/reward", json={"reward": 1.0}, headers=headers)
                assert posted.status_code == 401


async def test_more_rollouts_than_the_gateway_has_slots_are_asked_to_come_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway("--environment-slots", "1") as client:
        parent = await open_parent(client)
        read_text(await say(client, parent, "one", **{"X-Session-ID": "0"}))
        full = await say(client, parent, "one", **{"X-Session-ID": "1"})
        assert (full.status_code, "retry-after" in full.headers) == (429, True)
        await grade_all(client, run, await list_rollouts(client, parent))
        read_text(await say(client, parent, "one", **{"X-Session-ID": "1"}))


@pytest.mark.parametrize("named", [True, False])
async def test_rollouts_go_on_at_another_gateway_and_a_repetition_is_not_sampled_again(named: bool, tmp_path: Path) -> None:
    port = find_port()
    name = {"X-Session-ID": "a"} if named else {}
    async with running(tmp_path) as run, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with run.start_gateway(port) as gateway:
            await wait_for(client)
            parent = await open_parent(client)
            first = read_text(await say(client, parent, "one", **name))
            gateway.kill()
        with run.start_gateway(port):
            await wait_for(client)
            again = await say(client, parent, "one", **name, **{"x-stainless-retry-count": "1"})
            assert read_text(again) == first, "it was sampled before the kill"
            read_text(await say(client, parent, "one", first, "two", **name))
            other = await say(client, parent, "one", **({"X-Session-ID": "b"} if named else {}))
            assert other.headers["x-fleetbus-session"] != again.headers["x-fleetbus-session"]
            by_name = await list_rollouts(client, parent, **({"name": "a"} if named else {}))
            (mine,) = [each for each in by_name if each["id"] == again.headers["x-fleetbus-session"]]
            (result,) = await grade_all(client, run, [mine])
        assert (result.turns, result.attempts, result.segments) == (2, 2, ())


class _Log:
    """A log without any request."""

    async def last(self, subject: str) -> None:
        await anyio.lowlevel.checkpoint()


async def test_conversations_that_a_key_may_not_open_are_not_remembered() -> None:
    """Each begins otherwise, as whoever has a key can make them."""
    parent, log, nothing = Parent(id="e-1", rollouts=1), cast(Any, _Log()), cast(Any, None)
    rollouts = Rollouts(log, Subjects("run"), ["default"], nothing, nothing, nothing)
    rollouts._find_opened(parent.id).names.add("the only one")
    for number in range(100):
        call = AgentCall(messages=(ChatMessage(role="user", content=str(number)),))
        with pytest.raises(InvalidCall, match="opened its 1 rollouts"):
            await rollouts.choose_name(parent, call, str(number), repetition=False)
    assert not rollouts._find_opened(parent.id).roots


async def test_rollouts_of_another_gateway_count_and_are_looked_up_once() -> None:
    parent, looked_up = Parent(id="e-1", rollouts=9), list[str]()

    class Stored(_Log):
        async def last(self, subject: str) -> Any:
            looked_up.append(subject)
            payload = encode(
                EpisodeRequested(
                    episode_id="e", group_id="e", sample_index=0, split="eval", task=Task(key="k"), policy="p", deadline_ns=1
                )
            )
            return SimpleNamespace(payload=payload, subject=subject) if len(looked_up) <= 5 else None

    log, nothing = cast(Any, Stored()), cast(Any, None)
    rollouts = Rollouts(log, Subjects("run"), ["default"], nothing, nothing, nothing)
    call = AgentCall(messages=(ChatMessage(role="user", content="Begin."),))
    names = [await rollouts.choose_name(parent, call, "", repetition=False) for _ in range(2)]
    assert names[0] == names[1] and names[0].endswith("-5"), "it is the caller who takes it"
    assert len(looked_up) == 5 + 1 + 1


async def test_two_conversations_that_begin_alike_at_once_get_a_name_each() -> None:
    parent, names = Parent(id="e-1", rollouts=9), set[str]()
    log, nothing = cast(Any, _Log()), cast(Any, None)
    rollouts = Rollouts(log, Subjects("run"), ["default"], nothing, nothing, nothing)
    call = AgentCall(messages=(ChatMessage(role="user", content="Begin."),))

    async def choose() -> None:
        name = await rollouts.choose_name(parent, call, "", repetition=False)
        assert name not in names
        names.add(name)
        rollouts._find_opened(parent.id).names.add(name)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(choose)
    assert len(names) == 5
