"""An answer that its agent never had is given to the same question again; what it never had is not trained."""

from __future__ import annotations

import anyio
import msgspec
import numpy as np
import pytest

from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus_schemas import Action, ChatMessage, EpisodeFinished, Observation, UntrainedTurn, VersionSpan
from fleetbus_schemas.segment import NEW_ROOT, SegmentOrigin
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.environment import AgentEnvironment
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.base import ReportsUntrained
from fleetbus_workers.environment.composed_reward import ComposedRewardFactory
from fleetbus_workers.learner.batches import CreditPlan, build_sequence, count_trained
from tests.agents.endpoint_support import ANSWER, BODIES, CHAT, answer_next, serving

QUESTION = (ChatMessage(role="user", content="Go."),)


def act(turn: int) -> Action:
    return Action(episode_id="e", attempt=1, turn=turn, text=f"answer {turn}")


def observe(turn: int) -> Observation:
    return Observation(
        episode_id="e",
        attempt=1,
        turn=turn,
        policy="p",
        messages=QUESTION,
        tokens_left=100,
        environment_lane="e0",
        deadline_ns=1,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_went_away_gets_the_answer_when_it_asks_again_without_a_mark(stream: bool) -> None:
    body = BODIES[CHAT] | {"stream": stream}
    async with serving() as (client, session):
        with anyio.move_on_after(0.3):
            await client.post(CHAT, json=body)
        async with anyio.create_task_group() as group:
            texts: list[str] = []

            async def post() -> None:
                texts.append((await client.post(CHAT, json=body)).text)

            group.start_soon(post)
            while not session.repeated:  # noqa: ASYNC110 - nothing reports a request that joins
                await anyio.sleep(0.01)
            (await session.next_call()).set_answer(ANSWER)
        assert "Looking." in texts[0]
        with anyio.move_on_after(0.1) as waiting:
            await session.next_call()
        assert waiting.cancelled_caught, "one call was sampled"


async def test_the_same_question_after_a_delivered_answer_is_another_sample() -> None:
    async with serving() as (client, session):
        for _ in range(2):
            async with anyio.create_task_group() as group:
                group.start_soon(answer_next, session, ANSWER)
                await client.post(CHAT, json=BODIES[CHAT])
        assert session.repeated == 0


async def test_a_gateway_that_takes_over_gives_the_last_answer_once_to_whoever_asks_the_same_without_a_mark() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    conversations.restore_call(observe(0))
    conversations.answer(act(0))
    assert [each.turn for each in conversations.list_untrained()] == [0]

    known = session.enter(AgentCall(messages=QUESTION), "d", repetition=False)
    async with known.hold_request():
        assert (await known.wait()).text == "answer 0"
        known.delivered = True
    assert conversations.list_untrained() == ()

    fresh = session.enter(AgentCall(messages=QUESTION), "d", repetition=False)
    assert fresh is not known, "the agent has the answer: the same question is another sample"


@pytest.mark.integration
async def test_a_turn_that_a_later_call_continues_was_delivered() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    conversations.restore_call(observe(0))
    answer = conversations.answer(act(0))
    said = (*QUESTION, ChatMessage(role="assistant", content=answer.text), ChatMessage(role="user", content="On."))
    pending = session.enter(AgentCall(messages=said), "d", repetition=False)
    async with pending.hold_request():
        assert await conversations.receive_call() is not None
    assert conversations.list_untrained() == ()


def begin_again(*said: str, head: str = "Be brief.") -> Observation:
    """A second segment, whose conversation has these words of an assistant's in it."""
    spoken = (ChatMessage(role="assistant", content=text) for text in said)
    messages = (ChatMessage(role="system", content=head), *QUESTION, *spoken, ChatMessage(role="user", content="On."))
    origin = SegmentOrigin(parent=NEW_ROOT, kept=0, reason="system_changed")
    return msgspec.structs.replace(observe(1), segment=1, messages=messages, origin=origin)


@pytest.mark.parametrize(("said", "lost"), [(("answer 0",), [1]), (("another",), [0, 1]), ((), [0, 1])])
def test_a_conversation_that_begins_anew_with_an_answer_in_it_proves_after_a_takeover_that_it_came(
    said: tuple[str, ...], lost: list[int]
) -> None:
    conversations = Conversations(AgentSession(key="k"))
    conversations.restore_call(observe(0))
    conversations.answer(act(0))
    conversations.restore_call(begin_again(*said))
    conversations.answer(act(1))
    assert [each.turn for each in conversations.list_untrained()] == lost


def test_the_same_words_after_another_question_prove_nothing() -> None:
    conversations = Conversations(AgentSession(key="k"))
    conversations.restore_call(observe(0))
    conversations.answer(act(0))
    example = (ChatMessage(role="user", content="Is this spam?"), ChatMessage(role="assistant", content="answer 0"))
    again = begin_again()
    conversations.restore_call(msgspec.structs.replace(again, messages=(*example, *again.messages)))
    assert [each.turn for each in conversations.list_untrained()] == [0], "it is an example of a sub-agent's"


def test_words_that_an_agent_had_before_or_that_were_said_twice_prove_nothing() -> None:
    conversations = Conversations(AgentSession(key="k"))
    conversations.restore_call(msgspec.structs.replace(begin_again("answer 0"), segment=0))
    conversations.answer(act(0))
    conversations.restore_call(begin_again("answer 0", head="Be quick."))
    assert [each.turn for each in conversations.list_untrained()] == [0], "it brought the words itself"
    conversations = Conversations(AgentSession(key="k"))
    for segment in range(2):
        conversations.restore_call(msgspec.structs.replace(begin_again(head=f"{segment}"), segment=segment))
        conversations.answer(act(0))
    conversations.restore_call(msgspec.structs.replace(begin_again("answer 0"), segment=2))
    assert [each.turn for each in conversations.list_untrained()] == [0, 1], "it is of neither"


async def test_an_answer_that_comes_after_the_session_was_ended_was_not_delivered() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    pending = session.enter(AgentCall(messages=QUESTION), "d", repetition=False)
    async with pending.hold_request():
        await conversations.receive_call()
        session.end()
        conversations.answer(act(0))
        pending.delivered = True  # what it had is the request to stop
    assert conversations.list_untrained() == (UntrainedTurn(turn=0, reason="not_delivered"),)


def sampled(turn: int) -> Action:
    return Action(
        episode_id="e",
        attempt=1,
        turn=turn,
        text="",
        prompt_delta=pack_ids([1, 2]),
        sampled=pack_ids([3, 4, 5]),
        logprobs=pack_logprobs([-1.0 - turn, -2.0, -3.0]),
        versions=(VersionSpan(version=7, start=0, stop=3),),
    )


def finished(untrained: tuple[UntrainedTurn, ...], mask: list[bool]) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id="e",
        group_id="g",
        attempt=1,
        outcome="completed",
        worker="w",
        reward=1.0,
        turns=2,
        tokens=10,
        loss_mask=pack_mask(mask),
        policy_versions=(7,),
        untrained=untrained,
    )


PROMPT, SAID = [False] * 2, [True] * 3
LEFT_OUT = (UntrainedTurn(turn=0, reason="not_delivered"),)


def test_the_tokens_of_such_a_turn_are_context_and_nothing_is_trained_of_them() -> None:
    result = finished(LEFT_OUT, [*PROMPT, False, False, False, *PROMPT, *SAID])
    actions = [sampled(0), sampled(1)]
    assert not find_actions_problem(result, actions)
    sequence = build_sequence(result, actions, [0.5, 0.25], CreditPlan(), 1.0)
    np.testing.assert_array_equal(sequence.loss_mask, [False] * 7 + SAID)
    np.testing.assert_allclose(sequence.logprobs, [0.0] * 7 + [-2.0, -2.0, -3.0])
    np.testing.assert_allclose(sequence.advantages, [0.0] * 7 + [0.25] * 3)
    assert count_trained(result, actions) == (0, 3)


def test_a_mask_that_leaves_out_what_the_result_does_not_name_is_refused() -> None:
    actions = [sampled(0), sampled(1)]
    assert find_actions_problem(finished((), [*PROMPT, False, False, False, *PROMPT, *SAID]), actions)
    assert find_actions_problem(finished(LEFT_OUT, [*PROMPT, *SAID, *PROMPT, *SAID]), actions)


def test_weights_of_rewards_hide_no_turn_that_is_not_trained() -> None:
    inner = AgentEnvironment(None, grader=None, exit_seconds=1.0, grades="never")  # type: ignore[arg-type]
    inner._conversations = Conversations(AgentSession(key="k"))
    inner._conversations.restore_call(observe(0))
    inner._conversations.answer(act(0))
    factory = ComposedRewardFactory(lambda: inner, {"verifier": 1.0}, None, max_chars=9)  # type: ignore[arg-type]
    outer = factory()
    assert isinstance(outer, ReportsUntrained) and outer.list_untrained() == LEFT_OUT
