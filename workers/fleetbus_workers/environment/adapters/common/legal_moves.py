"""The moves of a game as a policy names them, and what follows when it names none. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.common.action_text import extract_action

TRIES = 3
"""Answers in a row that are no legal move; with the last of them a seat has lost."""


def list_moves(moves: Mapping[int, str]) -> str:
    """The legal moves by number, in words: a move without a name of its own is its number alone."""
    named = (f"{number} ({name})" if name != str(number) else name for number, name in moves.items())
    return f"Answer with one legal move: {', '.join(named)}."


def find_move(text: str, moves: Mapping[int, str]) -> int | None:
    """The number of the move that ``text`` names: by its name, in other letters' case if only one legal move is called so (in
    chess a bishop's Bxc3 is not a pawn's bxc3), else by its number; None if it is no legal one."""
    wanted = extract_action(text).strip(" .")
    exact = [number for number, name in moves.items() if name == wanted]
    found = exact or [number for number, name in moves.items() if name.casefold() == wanted.casefold()]
    return found[0] if len(found) == 1 else next((number for number in moves if wanted == str(number)), None)


def refuse(text: str, tries: int, asked: str) -> ChatMessage:
    """The message to a seat that has ``tries`` answers left."""
    return ChatMessage(role="user", content=f"{text.strip()[:80]!r} is no legal move; {tries} more and you lose. {asked}")
