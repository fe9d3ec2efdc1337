"""Rounds of a game: who is asked when, what is told ahead, and how an answer that is no legal move is asked again."""

from __future__ import annotations

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.common.rounds import Rounds
from fleetbus_workers.environment.base import Ahead, Start, Step


def say(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def ahead(seat: str, text: str) -> Ahead:
    return Ahead(messages=(say(text),), seat=seat)


def refused(left: int) -> ChatMessage:
    return say(f"{left} left")


def test_all_who_move_at_once_are_told_ahead_and_asked_in_their_order() -> None:
    rounds = Rounds(seats=True)
    start = rounds.start({"a": say("A"), "b": say("B"), "c": say("C")})
    assert start == Start(messages=(say("A"),), seat="a", ahead=(ahead("b", "B"), ahead("c", "C")))
    assert rounds.answer(1, refused) == Step(messages=(say("B"),), seat="b")
    assert rounds.answer(2, refused) == Step(messages=(say("C"),), seat="c")
    assert rounds.answer(3, refused) is None and rounds.chosen == {"a": 1, "b": 2, "c": 3}
    assert rounds.begin({"b": say("B2"), "c": say("C2")}) == Step(messages=(say("B2"),), seat="b", ahead=(ahead("c", "C2"),))


def test_a_wrong_answer_is_asked_again_after_the_others_and_told_ahead_of_them() -> None:
    rounds = Rounds(seats=True)
    rounds.start({"a": say("A"), "b": say("B")})
    again = rounds.answer(None, refused)
    assert again == Step(messages=(say("B"),), seat="b", tool_errors=1, ahead=(ahead("a", "2 left"),))
    assert rounds.answer(2, refused) == Step(messages=(say("2 left"),), seat="a")
    assert rounds.answer(None, refused) == Step(messages=(say("1 left"),), tool_errors=1), "the same player is asked next"
    assert rounds.answer(1, refused) is None
    assert list(rounds.chosen.items()) == [("a", 1), ("b", 2)], "in the order of the game"


def test_three_wrong_answers_in_a_row_lose_the_game_and_a_legal_one_between_them_forgives() -> None:
    rounds = Rounds(seats=False)
    assert rounds.start({"only": say("A")}) == Start(messages=(say("A"),))
    for legal_at in (1, 2):
        for _ in range(legal_at):
            rounds.answer(None, refused)
        assert rounds.answer(0, refused) is None, "a move may be 0"
        rounds.begin({"only": say("A")})
    assert [rounds.answer(None, refused) is not None for _ in range(2)] == [True, True] and not rounds.loser
    assert rounds.answer(None, refused) == Step(terminated=True, tool_errors=1) and rounds.loser == "only"
