"""Names in messages become subjects: with one key nobody ends the workers of another role, or empties everybody's journals."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, NatsSettings, RunSettings
from fleetbus.errors import BusError
from fleetbus_schemas import ChatMessage, Observation, PolicyPublished, SessionAnswer, SessionCall, Task, decode, encode
from fleetbus_schemas.message import MAX_MESSAGE_BYTES
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.backends import asyncio_alone
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES, LIMITS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
anyio_backend = asyncio_alone

CONFIGURATION = Configuration(
    run=RunSettings(name=TRUST),
    nats=NatsSettings(lanes=LANES, max_bytes=1 << 28),
    limits=LIMITS,
    environment=EnvironmentSettings(slots=2, session_slots=2),
    inference=InferenceSettings(slots=2),
)


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


async def run_beside(secured: SecuredServer, role: str, attack: Callable[[], Awaitable[None]]) -> None:
    """A worker of ``role`` for as long as the attack; how it ends, the test ends."""
    drain = anyio.Event()

    async def work() -> None:
        name = f"{role}-0"
        async with secured.connect(role, worker=name) as bus:
            common: dict[str, Any] = {"configuration": CONFIGURATION, "name": name, "drain": drain}
            if role == "environment":
                await run_environment(bus, **common, make=ScriptedEnvironment)
            else:
                await run_inference(bus, **common, sampler=ScriptedSampler(), template=ScriptedTemplate())

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await attack()
        drain.set()


async def call(bus: Bus, session: str, *, kind: Any = "open", wait: float = 0.0, key: str = "") -> str:
    """The refusal of a call; empty if it was carried out, "silence" if nobody answered."""
    asked = SessionCall(session=session, call=kind, key=key or kind, task=Task(key="t", prompt="p"), wait_seconds=wait)
    try:
        answer = decode(SessionAnswer, await bus.request(SUBJECTS.rpc("environment-0", "any"), encode(asked), timeout=2.0))
    except (BusError, TimeoutError):
        return "silence"
    return answer.refusal


async def call_until_carried_out(bus: Bus, session: str, *, kind: Any = "open", wait: float = 0.0) -> None:
    with anyio.fail_after(30):
        while await call(bus, session, kind=kind, wait=wait):  # noqa: ASYNC110  # another process starts
            await anyio.sleep(0.1)


async def test_calls_of_a_gateways_key_neither_end_a_worker_nor_touch_other_sessions(secured: SecuredServer) -> None:
    async def attack() -> None:
        async with secured.connect("gateway", worker="gateway-0") as thief, secured.connect("monitor") as monitor:
            await call_until_carried_out(thief, "honest")
            for session in ("x.y", "*", ">", "", "a b"):
                assert await call(thief, session) == "silence"
            for wait in (math.nan, -1.0):
                await call_until_carried_out(thief, f"waits-{'nan' if math.isnan(wait) else 'less'}", wait=wait)
                await call_until_carried_out(thief, f"waits-{'nan' if math.isnan(wait) else 'less'}", kind="close")
            for kind in ("close", "step", "open"):  # as long as a call may have, so that no answer has room for it
                assert await call(thief, "honest", kind=kind, key="k" * (MAX_MESSAGE_BYTES - 150)) == "silence"
            await call_until_carried_out(thief, "honest", kind="state")
            subjects = {entry.subject async for entry in monitor.scan([SUBJECTS.session("*")])}
            assert subjects == {SUBJECTS.session(name) for name in ("honest", "waits-nan", "waits-less")}

    await run_beside(secured, "environment", attack)


async def test_observations_of_an_environments_key_do_not_end_an_inference_worker(secured: SecuredServer) -> None:
    async def attack() -> None:
        async with secured.connect("environment", worker="environment-9") as thief:

            def observe(episode: str, lane: str) -> bytes:
                return encode(
                    Observation(
                        episode_id=episode,
                        attempt=1,
                        turn=0,
                        policy="default",
                        messages=(ChatMessage(role="user", content="go"),),
                        tokens_left=100,
                        environment_lane=lane,
                        deadline_ns=thief.now_ns() + 10**11,
                    )
                )

            for number, (episode, lane) in enumerate([("", "x.y.z"), ("", ""), ("", "*"), ("a.b", "e0"), ("other", "e0")]):
                subject = SUBJECTS.observation("default", "any", f"odd{number}")
                await thief.publish(subject, observe(episode or f"odd{number}", lane))
            await thief.publish(SUBJECTS.observation("default", "any", "honest"), observe("honest", "e0"))
            with anyio.fail_after(40):
                while await thief.last(SUBJECTS.action("e0", "honest")) is None:  # noqa: ASYNC110  # another process writes it
                    await anyio.sleep(0.1)
            odd = [await thief.last(SUBJECTS.action("e0", name)) for name in ("odd3", "odd4", "other")]
            assert odd == [None] * 3

    async with secured.connect("learner") as learner:
        published = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await learner.publish(SUBJECTS.policy("default"), encode(published))
    await run_beside(secured, "inference", attack)
