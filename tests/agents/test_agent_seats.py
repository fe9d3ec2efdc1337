"""Agents whose calls are of several seats: the model that a call names says which."""

from __future__ import annotations

import pytest

from fleetbus_schemas import ChatMessage, ContextChange
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, InvalidCall
from fleetbus_workers.environment.adapters.agent.models import OTHER_SEAT, find_seat
from fleetbus_workers.environment.adapters.agent.paths import Paths, digest_question
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.base import EnvironmentFailed
from tests.agents.test_agent_environment import act, playing

ASKED = (ChatMessage(role="user", content="Your move."),)
SAID = ChatMessage(role="assistant", content="Check.")


def name_models(*seats: str) -> list[dict[str, str]]:
    return [{"model": f"policy:seat:{seat}" if seat else "policy"} for seat in seats]


async def test_the_calls_of_two_seats_are_turns_in_contexts_of_their_own_with_their_own_rewards() -> None:
    limits = name_models("left", "right", "left", "right")
    async with playing(calls=4, limits=limits, reward=1.0, seats={"left": 1.0, "right": -1.0}) as (environment, start):
        steps = [await environment.step(act(f"answer {number}")) for number in range(4)]
        assert start.seat == "left"
        assert [step.seat for step in steps] == ["right", "left", "right", ""]
        assert [step.context for step in steps[:3]] == [
            ContextChange(reason="seat"),
            ContextChange(resume=0),
            ContextChange(resume=1),
        ]
        verdict = await environment.verify()
        assert (verdict.reward, dict(verdict.seats)) == (1.0, {"left": 1.0, "right": -1.0})


async def test_a_call_that_names_no_seat_in_a_session_with_seats_is_of_one_that_nobody_rewards() -> None:
    async with playing(calls=2, limits=name_models("left", ""), reward=1.0) as (environment, _):
        assert (await environment.step(act("one"))).seat == OTHER_SEAT


async def test_a_seat_in_a_session_that_began_without_one_is_refused() -> None:
    async with playing(calls=2, limits=name_models("", "left"), reward=1.0) as (environment, start):
        assert start.seat == ""
        with pytest.raises(EnvironmentFailed, match="400"):  # the agent ends with the refusal
            await environment.step(act("one"))


@pytest.mark.parametrize("more", ["right", ""])
async def test_a_seat_beyond_the_most_is_refused_where_it_calls(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    """A program of the policy's knows the key of the calls: naming seats without end would exclude its episode."""
    monkeypatch.setattr("fleetbus_workers.environment.adapters.agent.conversations.MAX_SEATS", 1)
    async with playing(calls=2, limits=name_models("left", more), reward=1.0) as (environment, _):
        with pytest.raises(EnvironmentFailed, match="400"):  # the agent ends with the refusal
            await environment.step(act("one"))


def test_a_call_that_names_no_seat_is_known_after_a_takeover() -> None:
    session = AgentSession()
    taken = session.remember(digest_question(ASKED, (), OTHER_SEAT))
    assert session.enter(AgentCall(messages=ASKED, model="policy"), "again", repetition=True) is taken


@pytest.mark.parametrize("model", ["policy:seat:", "policy:seat:a b", f"policy:seat:{'x' * 129}"])
def test_a_model_that_names_what_is_no_seat_is_refused(model: str) -> None:
    with pytest.raises(InvalidCall, match="names no seat"):
        find_seat(model)
    assert find_seat("policy") == find_seat("policy:untrained") == find_seat("gpt-5") == ""


def test_the_same_words_of_two_seats_are_two_conversations_and_two_questions() -> None:
    paths = Paths()
    for seat in ("left", "right"):
        attached = paths.attach(ASKED, (), seat)
        paths.add_answer(attached.segment, SAID)
    further = (*ASKED, SAID, ChatMessage(role="user", content="And now?"))
    assert [paths.attach(further, (), seat).segment for seat in ("left", "right")] == [0, 1]
    assert digest_question(ASKED, (), "left") != digest_question(ASKED, (), "right")
