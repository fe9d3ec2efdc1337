"""Step-wise sessions: a client drives one environment call by call. Calls and answers travel by request/reply on
``fbrpc.<run>.<worker>.<session>``; what was done is journalled on ``session.<session>`` before the answer goes out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fleetbus_schemas.chat import ChatMessage, ToolCall, ToolOutput, ToolSpec
from fleetbus_schemas.episode import Task
from fleetbus_schemas.message import Count, Key, Message
from fleetbus_schemas.names import Name, OptionalName
from fleetbus_schemas.segment import ContextChange

SessionCallKind = Literal["open", "reset", "step", "state", "verify", "close"]

SessionRefusal = Literal["", "no_slot", "draining", "busy", "gap", "conflict", "unknown", "closed", "moved", "log"]
"""Why a call was not executed. ``no_slot``, ``draining``, ``busy``, ``moved``, ``log``: ask again, perhaps elsewhere; the
others are the caller's mistake."""

SessionEnd = Literal["closed", "idle", "total", "env_failed", "timeout", "lost", "orphaned"]


class SessionCall(Message, frozen=True, kw_only=True):
    """Client → environment worker. ``key`` names the logical call: a repetition gets the stored answer.

    ``number`` is the position of the call in the session, from 0 (-1: the one that comes next). ``task`` goes with ``open``;
    ``seed`` with ``reset`` (None: the task's own); ``text`` and ``tool_calls`` with ``step`` (calls are parsed from the text
    if none are given). ``wait_seconds`` is how long the caller is willing to queue for a slot. ``earliest_sequence`` is the
    first log position at which a session that this call opens can stand, as its caller knew (0: unknown).
    """

    session: Name
    call: SessionCallKind
    key: Key
    number: int = -1
    task: Task | None = None
    seed: int | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    wait_seconds: float = 0.0
    earliest_sequence: int = 0


class SessionAnswer(Message, frozen=True, kw_only=True):
    """Environment worker → client. ``refusal``: not executed. ``end``: the session is over, ``error`` says why.

    ``reward`` is the step's own (0 if the environment grades at the end) or the verdict, which is the total of the episode
    since its reset (None: there is none, ``reason`` says why). ``unpaid`` goes with a verdict: what the steps were not rewarded
    of it, which belongs to the last step. ``tools`` are all that the environment has; the first ``prompted`` messages of a
    reset were made for a policy and tell it of them. ``output`` is what the called tool gave, where ``messages`` say it in the
    words that a policy reads.
    ``state`` is the environment's view for ``state``, and its further information for ``reset`` and ``step``. ``context`` is
    how the policy's context continues before ``messages``, if not by growing: it is the client's, who may follow
    (`fleetbus.client.contexts.PolicyContexts`) or not.
    """

    session: Name
    key: str
    number: int = -1
    refusal: SessionRefusal = ""
    end: SessionEnd | None = None
    error_class: str = ""
    error: str = ""
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    reward: float | None = None
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    worker: OptionalName = ""
    unpaid: float | None = None
    prompted: int = 0
    output: ToolOutput | None = None
    context: ContextChange | None = None


class SessionClaimed(Message, frozen=True, kw_only=True):
    """Environment worker → ``session.<session>``, expecting the last entry there: the claim, and the fencing token."""

    session: Name
    attempt: Count
    worker: Name
    nonce: str
    task: Task


class SessionRecorded(Message, frozen=True, kw_only=True):
    """Environment worker → ``session.<session>``, expecting its own last entry: one call that was executed, and its answer.

    ``held`` is what the environment holds elsewhere by then, as it spells it: the successor of a dead worker releases it.
    """

    session: Name
    call: SessionCall
    answer: SessionAnswer
    seconds: float = 0.0
    held: str = ""


class SessionEnded(Message, frozen=True, kw_only=True):
    """Environment worker → ``session.<session>``, expecting the last entry there: the tombstone. ``key`` names the call that
    ended it, if one did."""

    session: Name
    end: SessionEnd
    key: str = ""
    error_class: str = ""
    error: str = ""
    worker: OptionalName = ""
