"""A user of tau2 behind a server of chat completions, an agent that is trained: workers on a bus, the real packages."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import InferenceSettings, LimitSettings, RunSettings
from fleetbus_schemas import EpisodeFinished, SamplingSettings, Task
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.chat import ChatSampler
from fleetbus_workers.inference.chat_transcript import ChatTranscript
from fleetbus_workers.inference.scripted import STOP, ScriptedSampler, ScriptedTemplate
from tests.foreign.test_tau2_rewards import PYTHON, Actions, load
from tests.support.http_server import LocalServer
from tests.support.small_deployment import LIMITS, RUN, SmallDeployment, build_configuration, small_deployment

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(300)]

TASK = "16"
SPEC = f"tau2+python={PYTHON}:retail"


@functools.cache
def find_reference() -> tuple[Actions, list[str]]:
    """The calls of the task, and what has to be said."""
    return next((calls, told) for key, calls, told in load("retail") if key == TASK)


class Letters(ScriptedTemplate):
    """A token is a byte of text."""

    def decode_text(self, ids: Any) -> str:
        return bytes(each for each in ids if each != STOP).decode()


class Clerk(ScriptedSampler):
    """Makes the reference calls of the task, one per turn, then says what they did; ``asked`` hears the number of each turn."""

    def __init__(self, asked: Callable[[int], Awaitable[None]]) -> None:
        super().__init__()
        self._asked = asked

    async def generate(self, request: GenerationRequest) -> Generation:
        calls, told = find_reference()
        done = len(re.findall(rb"<tool_call>", bytes(request.ids)))
        await self._asked(done)
        text = f"This is so: {'; '.join(told)}."
        if done < len(calls):
            name, arguments = calls[done]
            text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        ids = [*text.encode(), STOP]
        made = await super().generate(request)
        span = made.versions[0]
        return Generation(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            finish_reason="stop",
            versions=(type(span)(version=span.version, start=0, stop=len(ids)),),
        )


class Customer:
    """A server of chat completions: asks, and ends the conversation once it is told; ``failing``, it says that it cannot."""

    def __init__(self, *, failing: bool) -> None:
        self.failing = failing
        self.seen: list[list[dict[str, str]]] = []

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event["body"], event.get("more_body", False)
        messages = json.loads(body)["messages"]
        self.seen.append(messages)
        text = "###STOP###" if messages[-1]["content"].startswith("This is so") else "I need help with my order."
        answer = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        await send(
            {
                "type": "http.response.start",
                "status": 503 if self.failing else 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@asynccontextmanager
async def deployed(
    customer: Customer, asked: Callable[[SmallDeployment, int], Awaitable[None]]
) -> AsyncIterator[SmallDeployment]:
    """Two environment workers, each with a process of the package; a worker of the policy, one of the user's."""
    async with AsyncExitStack() as held:
        group = await held.enter_async_context(anyio.create_task_group())
        server = LocalServer(lambda: customer, group)
        await server.start()
        held.push_async_callback(server.kill)
        limits = {name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__} | {
            "reset": 60,
            "step": 60,
            "action": 60,
            "open": 30,
            "episode": 200,
        }
        configuration = build_configuration(
            run=RunSettings(name=RUN, seats=f"user=its-model@{server.url}/v1"),
            limits=LimitSettings(**limits),
            inference=InferenceSettings(slots=4, max_model_len=1 << 17),
        )
        fleet = await held.enter_async_context(small_deployment(configuration))
        members = []
        for number in range(2):
            factory: Any = build_environment_factory(SPEC, verifier=None, configuration=configuration)  # type: ignore[arg-type]
            await held.enter_async_context(factory.run())
            members.append(fleet.environment(f"environment-{number}", make=factory, slots=1))
        sampler = ChatSampler([f"{server.url}/v1"], model="its-model")
        members.append(fleet.inference("inference-user", sampler=sampler, template=ChatTranscript(), policy="user"))
        members.append(fleet.inference("inference", sampler=Clerk(lambda turn: asked(fleet, turn)), template=Letters()))
        await fleet.heard(*members)
        yield fleet
        await fleet.drain_members()


async def play(*, failing: bool = False, kill_at: int = -1) -> tuple[EpisodeFinished, list[str], Customer, Any]:
    """The result, what was said turn by turn, the customer, and the audit's report. At the call ``kill_at`` the worker that
    plays is killed."""
    customer, killed = Customer(failing=failing), []

    async def hear(fleet: SmallDeployment, turn: int) -> None:
        if turn == kill_at and not killed:
            killed.append((await fleet.claims())[-1].worker)
            fleet.members[killed[0]].kill()

    async with deployed(customer, hear) as fleet:
        await fleet.request(task=Task(key="t", prompt="", config={"id": TASK}), sampling=SamplingSettings(max_tokens=4096))
        result = await fleet.result()
        said = [action.text for action in await fleet.actions()]
        report = await audit_run(fleet.bus, fleet.subjects)
    assert bool(killed) == (kill_at >= 0)
    return result, said, customer, report


async def test_the_users_turns_are_recorded_and_never_trained_and_a_takeover_gives_the_same_episode() -> None:
    calls, told = find_reference()
    result, said, customer, report = await play()
    assert (result.outcome, result.reward, result.error) == ("completed", 1.0, "")
    last = len(calls) + 2
    assert [(seat.name, seat.turns, seat.reward) for seat in result.seats] == [
        ("user", (0, last), None),
        ("agent", tuple(range(1, last)), 1.0),
    ]
    assert [(each.turn, each.reason) for each in result.untrained] == [(0, "seat"), (last, "seat")]
    assert report.balanced, report.findings
    assert [messages[-1]["content"] for messages in customer.seen] == [
        "Hello, this is customer service. What can I do for you?",
        f"This is so: {'; '.join(told)}.",
    ]
    again, said_again, customer_again, report = await play(kill_at=2)
    assert (again.outcome, again.attempt, again.error) == ("completed", 2, "")
    assert (again.reward, again.seats, again.untrained) == (result.reward, result.seats, result.untrained)
    assert said_again == said and customer_again.seen == customer.seen, "nobody is asked again what stands in the log"
    assert again.loss_mask == result.loss_mask
    assert report.balanced, report.findings


async def test_a_user_that_answers_nothing_gives_no_reward() -> None:
    result, _, _, _ = await play(failing=True)
    assert (result.outcome, result.reward) == ("lost", None)
    assert all(seat.reward is None for seat in result.seats)
