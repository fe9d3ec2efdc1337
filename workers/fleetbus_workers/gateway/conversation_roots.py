"""Tells conversations without names apart by what they continue. Pure.

Several conversations may begin with the same words, as the rollouts of one task do; each call holds all that was said so far,
the policy's last answer included. Above: `rollouts`.
"""

import hashlib
from collections.abc import Sequence

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer
from fleetbus_workers.environment.adapters.agent.paths import identify
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession


def digest_root(messages: Sequence[ChatMessage]) -> str:
    """The digest of what was said before the first answer."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        if message.role == "assistant":
            break
        digest.update(identify(message))
    return digest.hexdigest()


def find_continued(sessions: Sequence[AgentSession], call: AgentCall, digest: str, *, repetition: bool) -> AgentSession | None:
    """The session, of those that begin alike, that a call repeats or continues; None for a new one.

    Where the policy gave the same answer in several, it is the first that was not continued from there, else the newest.
    """
    for session in sessions:
        if session.is_asked_again(call, digest, repetition=repetition) or session.responses.continues(call):
            return session
    last = next((message for message in reversed(call.messages) if message.role == "assistant"), None)
    if last is None:
        return None
    said = identify(last)
    newest_first = [[_identify_answer(answer) for answer in session.list_answers()] for session in sessions]
    waiting = [session for session, answers in zip(sessions, newest_first, strict=True) if answers[:1] == [said]]
    branched = [session for session, answers in zip(sessions, newest_first, strict=True) if said in answers]
    return next(iter(waiting or reversed(branched)), None)


def _identify_answer(answer: Answer | None) -> bytes:
    if answer is None:
        return b""
    return identify(ChatMessage(role="assistant", content=answer.text, tool_calls=answer.tool_calls))
