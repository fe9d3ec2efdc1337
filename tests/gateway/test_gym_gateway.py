"""The remote-gym service over real HTTP: its episodes, and the cases in which the protocol's own server goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from fleetbus.client.sessions import SessionClient, sessions
from fleetbus_schemas import Action, SessionCall, SessionEnded, Task, encode
from fleetbus_workers.environment.adapters.remote_gym.client import ServerPool
from fleetbus_workers.environment.adapters.remote_gym.environment import RemoteGymEnvironment
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls, build_task
from fleetbus_workers.gateway.gym_service import GymService, build_gym_service
from tests.support.gym_service import Handler, fields_of, new_boundary, running, serve_gym
from tests.support.paying import PayingEnvironment, gym_gateway, paying_configuration
from tests.support.small_deployment import small_deployment

pytestmark = pytest.mark.integration


async def test_an_episode_is_played_from_connect_to_close() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        opened = await wire.connect({"goal": 2}, seed=7)
        session = opened["session_id"]
        assert (opened["obs"], opened["info"]) == ("seed 7", {"seed": 7, "odd": "NaN"})
        assert await wire.call(session, "system_prompt") == {"obs": "Count."}
        step = await wire.call(session, "step", action_str="a")
        assert (step["obs"], step["reward"], step["done"]) == ("1", 0.5, False)
        assert step["info"]["array"] == [1.5, "Infinity"]
        step = await wire.call(session, "step", action_str="b")
        assert (step["obs"], step["reward"], step["done"]) == ("2", 0.5, True)
        assert (await wire.call(session, "reset", seed=8))["obs"] == "seed 8"
        assert await wire.call(session, "close") == {"closed": True}
    assert handler.steps == ["a", "b"]
    assert handler.created == handler.closed == 2


async def test_connecting_without_a_seed_only_makes_the_session() -> None:
    async with serve_gym(Handler()) as wire:
        opened = await wire.connect(seed=None)
        assert set(opened) == {"session_id"}
        assert (await wire.call(opened["session_id"], "reset"))["obs"] == "seed 0"


async def test_a_step_whose_answer_was_lost_is_not_done_again() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        boundary = new_boundary()
        first = await wire.call(session, "step", boundary=boundary, action_str="a")
        assert await wire.call(session, "step", boundary=boundary, action_str="a") == first
        await wire.call(session, "step", action_str="a")
    assert handler.steps == ["a", "a"]


async def test_a_client_that_waits_less_than_a_step_takes_never_makes_two_at_once() -> None:
    handler = Handler()
    handler.step_seconds = 0.5
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        boundary = new_boundary()
        fields = {"session_id": session, "method": "step", "params": {"action_str": "a"}}
        with pytest.raises(httpx.ReadTimeout):
            await wire.post("/call", fields, boundary=boundary, timeout=0.1)
        assert fields_of(await wire.post("/call", fields, boundary=boundary))["obs"] == "1"
    assert (handler.steps, handler.most_at_once) == (["a"], 1)


async def test_an_environment_that_raises_ends_the_episode_and_is_not_tried_again() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        handler.trouble["step"] = RuntimeError("the simulator is gone")
        step = await wire.call(session, "step", action_str="a")
        assert (step["done"], step["reward"], step["info"]["training_usable"]) == (True, 0.0, False)
        assert "the simulator is gone" in step["info"]["error"]
        assert (await wire.call(session, "step", action_str="b"))["info"]["training_usable"] is False
        await wire.call(session, "close")
    assert handler.steps == ["a"]
    assert handler.created == handler.closed


async def test_a_connect_whose_answer_was_lost_leaves_no_orphan() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        boundary = new_boundary()
        first = await wire.connect(boundary=boundary)
        assert await wire.connect(boundary=boundary) == first
        assert (await wire.get("/sessions")).json()["num_sessions"] == 1
    assert handler.created == 1


@pytest.mark.parametrize("method", ["reset", "create_env"])
async def test_a_connect_that_fails_leaks_no_session_and_no_environment(method: str) -> None:
    handler = Handler(max_sessions=1)
    async with serve_gym(handler) as wire:
        handler.trouble[method] = RuntimeError("no scene")
        failed = await wire.connect()
        assert "no scene" in failed["info"]["error"]
        await wire.call(failed["session_id"], "close")
        assert (await wire.connect())["obs"] == "seed 1"
    assert handler.created == handler.closed


async def test_a_close_that_raises_or_whose_answer_is_lost_still_closes_once() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        handler.trouble["close"] = RuntimeError("stuck")
        boundary = new_boundary()
        assert await wire.call(session, "close", boundary=boundary) == {"closed": True}
        assert await wire.call(session, "close", boundary=boundary) == {"closed": True}
        assert (await wire.get("/sessions")).json()["num_sessions"] == 0
    assert handler.closed == 1


async def test_an_idle_session_expires_and_a_running_step_keeps_it() -> None:
    handler = Handler(session_timeout=1.0)
    handler.step_seconds = 2.5
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        assert (await wire.call(session, "step", action_str="slow"))["obs"] == "1"
        while (await wire.get("/sessions")).json()["num_sessions"]:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        late = await wire.post("/call", {"session_id": session, "method": "step", "params": {}})
        assert late.status_code == 404
    assert handler.created == handler.closed == 1


async def test_the_first_generation_of_clients_is_understood_too() -> None:
    head = b'--b0\r\nContent-Disposition: form-data; name="data"; filename="data.json"\r\n\r\n'
    body = head + b'{"env_config": {}, "seed": 4}\r\n--b0--\r\n'
    async with serve_gym(Handler()) as wire:
        headers = {"Content-Type": "multipart/form-data; boundary=b0"}
        response = await wire.request("POST", "/connect", content=body, headers=headers)
        assert fields_of(response)["obs"] == "seed 4"


async def test_the_first_way_of_making_a_service_takes_its_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_API_KEY", "k")
    monkeypatch.setenv("GYM_MAX_INFLIGHT", "7")
    async with running(build_gym_service(Handler())) as wire:
        told = {"ok": True, "service": "gym-env-service", "max_inflight": 7, "idempotent": True}
        assert (await wire.get("/health")).json() == told
        assert (await wire.get("/sessions")).status_code == 401


async def test_a_service_calls_what_its_maker_wants_called_at_its_start_and_end() -> None:
    called: list[str] = []

    async def started() -> None:
        called.append("started")

    handler = Handler(max_sessions=3)
    assert handler.get_session_stats()["num_sessions"] == 0
    application = GymService(handler).build(startup_callback=started, shutdown_callback=lambda: called.append("stopped"))
    assert handler.get_session_stats()["num_sessions"] == 0
    async with running(application) as wire:
        await wire.connect()
        assert called == ["started"]
        assert handler.get_session_stats()["num_sessions"] == 1
        told = (await wire.get("/sessions")).json()
        assert set(told) == {"num_sessions", "max_sessions", "session_timeout", "sessions"}
        assert set(told["sessions"][0]) == {"session_id", "created_at", "last_access", "idle_seconds", "will_timeout_in"}
    assert called == ["started", "stopped"]


async def test_thirty_two_clients_at_a_time_lose_and_double_nothing() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:

        async def play() -> None:
            session = (await wire.connect({"goal": 5}))["session_id"]
            for count in range(1, 6):
                assert (await wire.call(session, "step", action_str="x"))["obs"] == str(count)
            await wire.call(session, "close")

        async with anyio.create_task_group() as group:
            for _ in range(32):
                group.start_soon(play)
    assert (len(handler.steps), handler.created, handler.closed) == (160, 32, 32)


async def test_fleetbus_s_own_client_of_the_protocol_plays_through_the_service() -> None:
    handler = Handler()
    pool = ServerPool()
    async with serve_gym(handler) as wire, pool.run():
        environment = RemoteGymEnvironment(pool, [wire.url])
        await environment.open(Task(key="t", config={"goal": 2}, seed=5))
        start = await environment.reset()
        assert [message.content for message in start.messages] == ["Count.", "seed 5"]
        for turn, over in enumerate((False, True)):
            step = await environment.step(Action(episode_id="e", attempt=1, turn=turn, text="x"))
            assert (step.reward, step.terminated) == (0.5, over)
        assert (await environment.verify()).reward == 1.0
        await environment.close()
    assert handler.steps == ["x", "x"]


async def test_a_step_after_the_end_shows_the_end_again_and_executes_nothing() -> None:
    """The protocol's own client repeats whatever is refused, for minutes."""
    handler = Handler()
    async with serve_gym(handler) as wire:
        session = (await wire.connect({"goal": 1}))["session_id"]
        last = await wire.call(session, "step", action_str="a")
        late = await wire.call(session, "step", action_str="b")
        assert (late["obs"], late["done"], late["reward"]) == (last["obs"], True, 0.0)
        assert handler.steps == ["a"]
        assert (await wire.call(session, "reset", seed=3))["obs"] == "seed 3"
        assert (await wire.call(session, "step", action_str="c"))["obs"] == "1"
    assert handler.steps == ["a", "c"]


@pytest.mark.parametrize("method", ["step", "reset", "create_env"])
async def test_after_an_environment_failed_a_reset_begins_anew_in_the_same_session(method: str) -> None:
    handler = Handler(max_sessions=1)
    async with serve_gym(handler) as wire:
        if method == "step":
            session = (await wire.connect())["session_id"]
            handler.trouble["step"] = RuntimeError("the simulator is gone")
            boundary = new_boundary()
            failed = await wire.call(session, "step", boundary=boundary, action_str="a")
        else:
            handler.trouble[method] = RuntimeError("no scene")
            failed = await wire.connect()
            session = failed["session_id"]
        assert failed["info"]["training_usable"] is False
        repeated = new_boundary()
        for _ in range(2):
            assert (await wire.call(session, "reset", boundary=repeated, seed=7))["obs"] == "seed 7"
        assert (await wire.call(session, "system_prompt"))["obs"] == "Count."
        assert (await wire.call(session, "step", action_str="b"))["obs"] == "1"
        if method == "step":
            assert await wire.call(session, "step", boundary=boundary, action_str="a") == failed, "a late repetition"
        assert (await wire.call(session, "step", action_str="c"))["obs"] == "2"
        assert (await wire.get("/sessions")).json()["num_sessions"] == 1
        assert await wire.call(session, "close") == {"closed": True}
    assert [step for step in handler.steps if step != "a"] == ["b", "c"]
    assert handler.steps.count("a") == (method == "step")
    assert handler.created == handler.closed


async def test_another_gateway_goes_on_after_a_failure_too() -> None:
    async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet) as first, gym_gateway(fleet) as second:
        fleet.environment("e1", make=PayingEnvironment)
        session = (await first.connect({"rewards": [1.0], "verdict": 1.0}))["session_id"]
        await first.call(session, "step", action_str="x")
        await first.call(session, "reset", seed=1)
        broken = (await first.connect({"rewards": [], "verdict": 1.0}))["session_id"]
        assert (await first.call(broken, "step", action_str="x"))["info"]["error_class"] == "IndexError"
        begun = await first.call(broken, "reset", seed=2)
        assert begun["obs"] == "begin"
        assert (await second.call(broken, "reset", seed=3))["obs"] == "begin"
        assert await second.call(broken, "close") == {"closed": True}
        assert (await first.post("/call", {"session_id": broken, "method": "step"})).status_code == 404
        await first.call(session, "close")


@pytest.mark.parametrize("length", [126, 127, 128])
async def test_a_session_that_another_client_gave_a_long_name_goes_on_after_a_failure_too(length: int) -> None:
    session, task = "s" * length, build_task({"rewards": [], "verdict": 1.0})
    async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet) as first, gym_gateway(fleet) as second:
        fleet.environment("e1", make=PayingEnvironment)
        async with sessions(fleet.bus, fleet.subjects) as client:
            await client.call(SessionCall(session=session, call="open", key="k", task=task), timeout=10)
        await first.call(session, "reset", seed=1)
        assert (await first.call(session, "step", action_str="x"))["info"]["error_class"] == "IndexError"
        assert (await first.call(session, "reset", seed=2))["obs"] == "begin"
        assert (await second.call(session, "reset", seed=3))["obs"] == "begin"
        assert await second.call(session, "close") == {"closed": True}


def forgetful_gateway(client: SessionClient, made: list[GymCalls]) -> GymGateway:
    """Forgets a session after two idle seconds. Its calls are added to ``made`` as it starts."""

    @asynccontextmanager
    async def open_calls() -> AsyncIterator[GymCalls]:
        made.append(GymCalls(client, call_seconds=60))
        yield made[-1]

    return GymGateway(open_calls, GymSettings(session_timeout=2.0))


async def test_the_failed_environments_of_a_session_that_nobody_goes_on_with_are_forgotten() -> None:
    made: list[GymCalls] = []
    async with small_deployment(paying_configuration()) as fleet, sessions(fleet.bus, fleet.subjects) as client:
        fleet.environment("e1", make=PayingEnvironment)
        async with running(forgetful_gateway(client, made).application()) as wire:
            session = (await wire.connect({"rewards": [], "verdict": 1.0}))["session_id"]
            for seed in (1, 2):
                assert (await wire.call(session, "step", action_str="x"))["info"]["error_class"] == "IndexError"
                assert (await wire.call(session, "reset", seed=seed))["obs"] == "begin"
            assert (await wire.call(session, "step", action_str="x"))["info"]["error_class"] == "IndexError"
            with anyio.fail_after(30):
                while made[0]._failed_journals:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            assert (await wire.call(session, "reset", seed=3))["obs"] == "begin"
            assert await wire.call(session, "close") == {"closed": True}


@pytest.mark.parametrize("is_lost", [False, True], ids=["left idle", "lost by its worker"])
async def test_nothing_is_kept_of_sessions_that_their_clients_left(is_lost: bool) -> None:
    """Some hundred bytes of each were kept for as long as the gateway ran."""
    made: list[GymCalls] = []
    async with small_deployment(paying_configuration()) as fleet, sessions(fleet.bus, fleet.subjects) as client:
        fleet.environment("e1", make=PayingEnvironment)
        async with running(forgetful_gateway(client, made).application()) as wire:
            session = (await wire.connect({"rewards": [1.0], "verdict": 1.0}))["session_id"]
            assert made[0]._numbers
            if is_lost:
                end = SessionEnded(session=session, end="lost", worker="e2")
                await fleet.bus.publish(fleet.subjects.session(session), encode(end))
                assert (await wire.call(session, "step", action_str="x"))["info"]["outcome"] == "lost"
            with anyio.fail_after(30):
                while made[0]._numbers:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            assert not made[0].sessions


def test_a_handler_with_calls_of_its_own_is_refused_and_not_ignored() -> None:
    """The protocol's own servers would ask them."""
    with pytest.raises(TypeError, match="create_env"):
        type("Own", (Handler,), {"connect": lambda self, env_config: None})
