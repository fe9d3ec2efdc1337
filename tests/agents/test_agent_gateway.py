"""`fleetbus gateway agents`: the run's episodes for agents that run elsewhere, on a real server."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.gateway.agent_keys import SECRET_FILE, read_secret
from fleetbus_workers.gateway.rollouts import read_request
from tests.agents.gateway_support import RUN, SUBJECTS, bearer, find_port, grader, read_text, running, say, take, wait_for

pytestmark = [pytest.mark.timeout(120), pytest.mark.integration]


async def test_an_agent_outside_plays_the_learners_episode_and_posts_its_reward_once(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        session = await take(client)
        assert (session["id"], session["purpose"], session["task"]["prompt"]) == ("e1", "train", "Say it.")
        first = read_text(await say(client, session, "one"))
        second = read_text(await say(client, session, "one", first, "two"))
        rewarded = await client.post("/sessions/e1/reward", json={"reward": 0.5}, headers=grader(session))
        assert rewarded.json() | {"outcome": "completed", "reward": 0.5} == rewarded.json(), "it is in the log by then"
        repeated = await client.post("/sessions/e1/reward", json={"reward": 0.5}, headers=grader(session))
        assert (repeated.status_code, repeated.json()) == (200, rewarded.json()), "its answer may have been lost"
        again = await client.post("/sessions/e1/reward", json={"reward": 1.0}, headers=grader(session))
        assert (again.status_code, again.json()["reward"]) == (409, 0.5)
        late = read_text(await say(client, session, "one", first, "two", second, "three"))
        assert "over" in late
        shown = (await client.get("/sessions/e1/trajectory", headers=bearer(session))).json()
        assert [turn["text"] for turn in shown["turns"]] == [first, second] or len(shown["turns"]) == 2
        assert all(len(turn["sampled_ids"]) == len(turn["logprobs"]) > 0 for turn in shown["turns"])
        result = await run.result("e1")
        assert (result.outcome, result.reward, result.turns, result.segments) == ("completed", 0.5, 2, ())


async def test_a_request_is_pulled_for_an_agent_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        empty = await client.get("/sessions/next", params={"wait": 0})
        assert empty.status_code in (204, 200)
        if empty.status_code == 204:
            assert (await take(client))["id"] == "e1"
        with anyio.move_on_after(0.3):
            await client.get("/sessions/next", params={"wait": 60})
        waiting = await client.get("/sessions/next", params={"wait": 0.2})
        assert waiting.status_code == 204
        await run.request("e2")
        assert (await take(client))["id"] == "e2", "who went away gets nothing"


async def test_a_repeated_request_for_a_session_gets_the_same_one(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        key = {"Idempotency-Key": "first"}
        with anyio.move_on_after(0.3):
            await client.get("/sessions/next", params={"wait": 60}, headers=key)
        await run.request("e1")
        await run.request("e2")
        session = await take(client, **key)
        assert await take(client, **key) == session, "its answer may have been lost"
        assert (await take(client))["id"] != session["id"]
        read_text(await say(client, session, "one"))
        assert await take(client, **key) == session
        await client.post(session["url"] + "/reward", json={"reward": 1.0}, headers=grader(session))
        await run.request("e3")
        assert (await take(client, **key))["id"] == "e3", "what is over is not given again"


async def test_a_session_that_ends_before_a_call_trains_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        session = await take(client)
        ended = (await client.post("/sessions/e1/end", headers=grader(session))).json()
        assert ended["outcome"] == "env_failed" and "before its agent called" in ended["error"]


async def test_an_agent_is_asked_to_stop_when_its_turns_are_used_up_and_its_reward_is_taken_then(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1", max_turns=1)
        session = await take(client)
        first = read_text(await say(client, session, "one"))
        assert "over" in read_text(await say(client, session, "one", first, "two"))
        done = await client.post("/sessions/e1/reward", json={"reward": 0.5}, headers=grader(session))
        assert done.json() | {"outcome": "truncated", "reward": 0.5} == done.json()


async def test_what_is_wrong_with_a_key_is_said_in_the_callers_protocol(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        await run.request("e2")
        one, two = await take(client), await take(client)
        other = await client.post(f"/sessions/{one['id']}/reward", json={"reward": 1.0}, headers=grader(two))
        assert (other.status_code, other.json()) == (401, {"detail": "this key is of another session"})
        forged = {"key": one["key"][:-1] + ("0" if one["key"][-1] != "0" else "1")}
        wrong = await say(client, forged, "one")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "invalid_request_error")
        messages = await client.post("/v1/messages", json={}, headers={"x-api-key": forged["key"]})
        assert messages.json()["error"]["type"] == "authentication_error"
        for key in ("fbs-", "fbs-..", f"{one['key']}.", "fbs-e1.zz.\u00e9", "x"):
            strange = await client.post(f"/s/{key}/v1/chat/completions", json={})
            assert strange.status_code == 401, key
        assert (await client.get("/sessions/nobody/trajectory", headers=bearer(one))).status_code == 401
        await run.request("e3", seconds=2)
        brief = await take(client)
        await anyio.sleep(2.5)
        expired = await say(client, brief, "one")
        assert (expired.status_code, expired.json()["error"]["message"]) == (401, "this key has expired")


async def test_null_excludes_an_episode_and_a_verifier_grades_alone(tmp_path: Path) -> None:
    verifier = "async def verify(env, final_answer=None):\n    return 0.25\n"
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        session = await take(client)
        await say(client, session, "one")
        await client.post("/sessions/e1/reward", json={"reward": None, "reason": "no network"}, headers=grader(session))
        result = await run.result("e1")
        assert (result.outcome, result.reward, result.error) == ("verifier_unknown", None, "no network")
        await run.request("e2", task=Task(key="v", prompt="p", verifier=verifier))
        session = await take(client)
        assert session["takes_reward"] is False
        await say(client, session, "one")
        refused = await client.post("/sessions/e2/reward", json={"reward": 1.0}, headers=grader(session))
        assert refused.status_code == 403
        ended = (await client.post("/sessions/e2/end", headers=grader(session))).json()
        assert (ended["outcome"], ended["reward"]) == ("completed", 0.25)


async def test_evaluations_are_opened_by_whoever_has_the_token_and_given_to_nobody_else(tmp_path: Path) -> None:
    opener = "opener-x7Kq2mPz9vLw4tRb5"
    token = {"Authorization": f"Bearer {opener}"}
    async with running(tmp_path) as run, run.gateway("--environment-slots", "2", AGENTS_TOKEN=opener) as client:
        asked = {"task": {"key": "mine", "prompt": "p"}, "version": 0}
        assert (await client.post("/sessions", json=asked)).status_code == 401
        assert (await client.post("/sessions", json={"task_key": "none"}, headers=token)).status_code == 404
        assert (await client.post("/sessions", json={"purpose": "train", "task_key": "k"}, headers=token)).status_code == 400
        assert (await client.post("/sessions", json=asked | {"version": -1}, headers=token)).status_code == 400
        code = {"task": {"key": "k", "prompt": "p", "verifier_code": "def verify(env):\n    return 1.0\n"}}
        refused = await client.post("/sessions", json=code, headers=token)
        assert refused.status_code == 400 and "code that runs here" in refused.json()["detail"]
        opened = await client.post("/sessions", json=asked, headers=token)
        assert opened.status_code == 201 and opened.json()["purpose"] == "evaluate"
        session = opened.json()
        empty = await client.get("/sessions/next", params={"wait": 1.5}, headers=token)
        assert empty.status_code == 204, "it is its opener's"
        read_text(await say(client, session, "one"))
        more = (await client.post("/sessions", json=asked, headers=token)).json()
        read_text(await say(client, more, "one"))
        full = await client.post("/sessions", json=asked, headers=token)
        assert (full.status_code, "retry-after" in full.headers) == (429, True)
        done = await client.post(f"/sessions/{session['id']}/reward", json={"reward": 1.0}, headers=grader(session))
        assert done.json()["reward"] == 1.0


async def test_an_evaluation_is_found_behind_requests_that_no_agent_asks_for(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        for number in range(80):
            await run.request(f"e{number}")
        session = (await client.post("/sessions", json={"task": {"key": "mine", "prompt": "p"}})).json()
        read_text(await say(client, session, "one"))


async def test_the_key_of_an_evaluation_that_waited_for_room_lasts_as_long_as_its_episode(tmp_path: Path) -> None:
    """Its request is stored with a later deadline: other gateways refused the key while the episode went on."""
    opened: list[httpx.Response] = []
    async with running(tmp_path, max_bytes=200_000) as run, run.gateway() as client:

        async def open_session() -> None:
            asked = {"task": {"key": "mine", "prompt": "p" * 250_000}}
            opened.append(await client.post("/sessions", json=asked))

        async with anyio.create_task_group() as group:
            group.start_soon(open_session)
            await anyio.sleep(3)
            assert not opened, opened[0].text
            await run.bus.declare(plan_run(RUN, lanes=4, max_bytes=1 << 28))
        session = opened[0].json()
        stored = await read_request(run.bus, SUBJECTS, ["default"], session["id"])
    assert stored is not None
    key = f"{session['id']}.{stored.deadline_ns // 10**9:x}"
    assert session["expires"] == stored.deadline_ns // 10**9
    assert [session[each].rpartition(".")[0] for each in ("key", "reward_key")] == [f"fbs-{key}", f"fbr-{key}"]


async def test_a_page_of_another_site_is_given_no_session(tmp_path: Path) -> None:
    async with running(tmp_path) as run, run.gateway() as client:
        await run.request("e1")
        asked = await client.get("/sessions/next", headers={"sec-fetch-site": "cross-site"})
        assert asked.status_code == 403
        assert (await take(client))["id"] == "e1"


def test_a_secret_that_is_not_whole_makes_no_keys(tmp_path: Path) -> None:
    run = RunSettings(name="r", folder=str(tmp_path))
    read_secret("", run)
    (file,) = tmp_path.rglob(SECRET_FILE)
    file.write_bytes(b"")
    with pytest.raises(OSError, match="not whole"):
        read_secret("", run)


async def test_a_killed_gateway_is_replaced_in_the_middle_of_a_session(tmp_path: Path) -> None:
    port = find_port()
    async with (
        running(tmp_path) as run,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        with run.start_gateway(port) as gateway:
            await wait_for(client)
            await run.request("e1")
            session = await take(client)
            first = read_text(await say(client, session, "one"))
            second = read_text(await say(client, session, "one", first, "two"))
            gateway.kill()
        with run.start_gateway(port):
            await wait_for(client)
            repeated = await say(client, session, "one", first, "two", **{"x-stainless-retry-count": "1"})
            assert read_text(repeated) == second, "it was sampled before the kill, and is not sampled again"
            third = read_text(await say(client, session, "one", first, "two", second, "three"))
            assert third
            ended = await client.post("/sessions/e1/reward", json={"reward": 1.0}, headers=grader(session))
            assert ended.json()["outcome"] == "completed"
        result = await run.result("e1")
        assert (result.reward, result.turns, result.attempts, result.segments) == (1.0, 3, 2, ())
        report = await audit_run(run.bus, SUBJECTS)
        assert report.balanced, report.findings
