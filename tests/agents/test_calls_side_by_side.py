"""Calls of one agent that arrive together are sampled together, each gets its own answer, and what is recorded is as if they
had been asked one after another."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import NEW_ROOT, Action, ChatMessage, EpisodeFinished, Observation, SamplingSettings, SegmentOrigin, Task
from fleetbus_schemas.chat import Role
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession, PendingCall
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import build_configuration, small_deployment

AGENT = Path(__file__).with_name("burst_agent.py")
LIMITS = LimitSettings(open=30, reset=30, step=30, action=60, verify=30, close=30, episode=90, grace=10, drain=10)
ANSWER_SECONDS = 2.0
CALLS = 4


def ask(session: AgentSession, *said: str, seat: str = "") -> PendingCall:
    roles: tuple[Role, Role] = ("user", "assistant")
    messages = tuple(ChatMessage(role=roles[place % 2], content=text) for place, text in enumerate(said))
    model = f"policy:seat:{seat}" if seat else "policy"
    return session.enter(AgentCall(messages=messages, model=model), f"{said}{seat}{session.requests}", repetition=False)


def act(turn: int) -> Action:
    return Action(episode_id="e", attempt=1, turn=turn, text=f"answer {turn}")


async def hold(pending: PendingCall, group: anyio.abc.TaskGroup) -> None:
    """Somebody waits for the answer."""
    started = anyio.Event()

    async def wait() -> None:
        async with pending.hold_request():
            started.set()
            await pending.wait()

    group.start_soon(wait)
    await started.wait()


def get_text(pending: PendingCall) -> str:
    assert isinstance(pending.answer, Answer)
    return pending.answer.text


async def test_calls_of_contexts_of_their_own_are_told_ahead_in_their_order_and_have_their_own_answers() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    async with anyio.create_task_group() as group:
        calls = [ask(session, f"task {number}") for number in range(3)]
        for call in calls:
            await hold(call, group)
        first = await conversations.receive_call()
        told = [await conversations.receive_ahead() for _ in range(2)]
        assert first is not None and first.segment == 0
        assert [each.messages[0].content for each in told if each is not None] == ["task 1", "task 2"]
        assert [each.context.reason for each in told if each is not None and each.context is not None] == ["sub_agent"] * 2
        for turn in range(3):
            conversations.answer(act(turn))
            if turn < 2:
                attached = await conversations.receive_call()
                assert attached is not None and attached.segment == turn + 1
                change = conversations.follow(attached)
                assert change == told[turn].context  # type: ignore[union-attr]
        assert [get_text(call) for call in calls] == ["answer 0", "answer 1", "answer 2"]


async def test_a_call_that_continues_a_conversation_without_an_answer_waits_for_that() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    async with anyio.create_task_group() as group:
        await hold(opening := ask(session, "task"), group)
        await conversations.receive_call()
        conversations.answer(act(0))
        going_on = [ask(session, "task", get_text(opening), text) for text in ("left", "right")]
        for call in going_on:
            await hold(call, group)
        assert (await conversations.receive_call()) is not None
        assert await conversations.receive_ahead() is None, "it continues what the first one continues"
        assert await conversations.receive_ahead() is None
        conversations.answer(act(1))
        attached = await conversations.receive_call()
        assert attached is not None and attached.segment == 1, "after the answer to the first it is another conversation"
        conversations.answer(act(2))
        assert [get_text(call) for call in going_on] == ["answer 1", "answer 2"]


async def test_two_calls_that_say_the_same_are_two_conversations() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    async with anyio.create_task_group() as group:
        calls = []
        for _ in range(2):
            session.requests += 1  # another body
            calls.append(ask(session, "the same"))
            await hold(calls[-1], group)
        await conversations.receive_call()
        told = await conversations.receive_ahead()
        assert told is not None and told.context is not None and told.context.resume is None
        conversations.answer(act(0))
        await conversations.receive_call()
        conversations.answer(act(1))
        assert [get_text(call) for call in calls] == ["answer 0", "answer 1"]


async def test_a_takeover_gives_each_call_that_was_under_way_its_own_answer_once() -> None:
    """Two of three were stored before the worker died; their clients, and that of the third, ask again."""
    session = AgentSession(key="k")
    conversations = Conversations(session)
    for turn in range(2):
        origin = SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent") if turn else None
        observed = Observation(
            episode_id="e",
            attempt=1,
            turn=turn,
            policy="p",
            messages=(ChatMessage(role="user", content=f"task {turn}"),),
            tokens_left=9,
            environment_lane="e0",
            deadline_ns=1,
            segment=turn,
            origin=origin,
            ahead=turn,
        )
        conversations.restore_call(observed)
        conversations.answer(act(turn))
    async with anyio.create_task_group() as group:
        calls = [ask(session, f"task {number}") for number in (2, 1, 0)]
        for call in calls:
            await hold(call, group)
        assert [get_text(call) for call in calls[1:]] == ["answer 1", "answer 0"], "they are known by what they ask"
        attached = await conversations.receive_call()
        assert attached is not None and (attached.segment, attached.messages[0].content) == (2, "task 2")
        conversations.answer(act(2))
        assert get_text(calls[0]) == "answer 2"


@pytest.mark.parametrize("is_moved", [False, True])
async def test_the_end_of_a_session_answers_the_calls_that_were_told_ahead_too(is_moved: bool) -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    calls = [ask(session, f"task {number}") for number in range(3)]
    for call in calls:
        call.waiters += 1
    await conversations.receive_call()
    await conversations.receive_ahead()
    session.move() if is_moved else session.end()
    assert all(call.answer is not None for call in calls)


async def test_a_call_that_a_session_answers_at_its_end_keeps_the_limits_that_it_was_told_with() -> None:
    """With others its turn would be something else than was told, and end the episode."""
    session = AgentSession(key="k")
    conversations = Conversations(session)
    for number in range(2):
        call = AgentCall(messages=(ChatMessage(role="user", content=f"task {number}"),), max_tokens=3, stop=("x",))
        session.enter(call, str(number), repetition=False).waiters += 1
    await conversations.receive_call()
    told = await conversations.receive_ahead()
    session.end()
    conversations.answer(act(0))
    await conversations.receive_call()
    assert told is not None and told.limits == conversations.turn_limits
    assert told.limits.max_tokens == 3


async def test_calls_that_were_told_ahead_are_not_played_when_their_agent_has_ended() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    for number in range(3):
        ask(session, f"task {number}").waiters += 1
    await conversations.receive_call()
    assert await conversations.receive_ahead() is not None
    session.conclude()
    conversations.answer(act(0))
    assert await conversations.receive_call() is None


async def test_a_call_whose_client_went_away_while_it_had_to_wait_is_not_played() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    ask(session, "task").waiters += 1
    await conversations.receive_call()
    conversations.answer(act(0))
    going_on = [ask(session, "task", "answer 0", text) for text in ("left", "right", "straight")]
    for call in going_on:
        call.waiters += 1
    await conversations.receive_call()
    assert await conversations.receive_ahead() is None, "it continues what the one in play continues"
    going_on[1].waiters = 0
    conversations.answer(act(1))
    attached = await conversations.receive_call()
    assert attached is not None and attached.messages[-1].content == "straight"
    assert ask(session, "task", "answer 0", "right") is not going_on[1], "a repetition of it is a call of its own"


async def play(config: dict[str, object], *, turns_at_once: int = 8) -> tuple[EpisodeFinished, list[Observation], list[Action]]:
    environment = EnvironmentSettings(agent_reward_url=True)
    make = build_environment_factory(
        f"agent:{sys.executable} {AGENT}",
        verifier=None,  # type: ignore[arg-type]
        configuration=Configuration(environment=environment),
    )
    configuration = build_configuration(limits=LIMITS, environment=EnvironmentSettings(slots=8, turns_at_once=turns_at_once))
    with anyio.fail_after(90):
        async with make.run(), small_deployment(configuration) as fleet:
            members = [fleet.inference("i1", sampler=ScriptedSampler(delay=lambda _: ANSWER_SECONDS))]
            members.append(fleet.environment("e1", make=make))
            await fleet.heard(*members)
            fleet.beats.pop("i1")
            await fleet.until(lambda: "i1" in fleet.beats)  # the environment worker has heard of it by then
            sampling = SamplingSettings(max_tokens=8)
            await fleet.request("e", task=Task(key="t", prompt="Say", config=config), sampling=sampling)
            result = await fleet.result("e")
            report = await audit_run(fleet.bus, fleet.subjects)
            assert not report.findings, report.findings
            return result, await fleet.observations(), await fleet.actions()


@pytest.mark.integration
async def test_four_calls_at_once_take_about_as_long_as_one() -> None:
    result, observations, actions = await play({"calls": CALLS, "rounds": 2})
    assert (result.outcome, result.reward) == ("completed", 1.0), result.error
    assert [action.turn for action in actions] == list(range(2 * CALLS))
    assert max(observation.ahead for observation in observations) == CALLS - 1
    seconds = result.timings["action"]
    assert seconds < 2 * ANSWER_SECONDS + 1.5, f"{2 * CALLS} calls of {ANSWER_SECONDS} s in {seconds} s"
    alone = (await play({"calls": CALLS, "rounds": 1}, turns_at_once=1))[0]
    assert alone.timings["action"] > CALLS * ANSWER_SECONDS
    assert result.turns == 2 * CALLS
