"""The output of the environment, on its way to the policy."""

from __future__ import annotations

from fleetbus_schemas.chat import ChatMessage, ToolSpec
from fleetbus_schemas.episode import SamplingSettings
from fleetbus_schemas.message import Count, Digest, Message
from fleetbus_schemas.names import Name
from fleetbus_schemas.segment import SegmentOrigin


class Observation(Message, frozen=True, kw_only=True):
    """Environment worker → inference worker, on ``obs.<policy>.<lane>.<episode>``.

    ``messages`` are only the chat messages since the last action (on turn 0: the whole prompt); ``tools`` only on turn 0.
    ``history_hash`` is the token history before this turn (`fleetbus_schemas.tokens.extend_history`). The answer goes to
    ``act.<environment_lane>.<episode>`` and expects ``action_sequence`` as the last sequence there.
    ``hop`` counts re-routings of one turn; handlers key on (episode, attempt, turn).

    ``segment`` is the sequence that this turn extends, or begins: then ``origin`` says where it leaves its parent, and
    ``history_hash`` is the parent's. A new root begins as turn 0 does: the whole prompt, its tools, no history. ``segments``
    counts those begun, this one included: a worker that has to begin another one gives it that number. ``seat`` is the part of
    the episode that acts next; empty if there is one only. What is sampled for a turn that is not ``trained`` may come without
    log-probabilities.

    ``ahead`` turns before this one had no answer when it was asked for: it stands on none of them, and is sampled beside them.
    Its Action expects that of the turn before it, of the same attempt, in place of ``action_sequence``; who cannot store it so
    drops it, for it is asked for again in its turn.
    """

    episode_id: Name
    attempt: Count
    turn: Count
    hop: int = 0
    policy: Name
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    sampling: SamplingSettings = SamplingSettings()
    tokens_left: int
    pinned_version: int | None = None
    history_hash: Digest = b""
    environment_lane: Name
    action_sequence: int = 0
    request_sequence: int = 0
    deadline_ns: int
    segment: Count = 0
    origin: SegmentOrigin | None = None
    segments: int = 1
    seat: str = ""
    trained: bool = True
    ahead: Count = 0
