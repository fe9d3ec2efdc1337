"""A turn of the policy: text, tokens, log-probabilities, and which weights made them."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus_schemas.chat import ToolCall
from fleetbus_schemas.message import Count, Digest, Message
from fleetbus_schemas.names import Name, OptionalName
from fleetbus_schemas.segment import SegmentOrigin

FinishReason = Literal["stop", "length", "failed"]
"""``stop``: a stop token was sampled; ``length``: tokens used up; ``failed``: no tokens, ``error`` says why."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sampled tokens ``[start, stop)`` of one action came from policy version ``version``."""

    version: int
    start: int
    stop: int


class ShownImage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Ids ``[start, stop)`` of a prompt delta stand for the image ``object``, the SHA-256 (hex) of its bytes in the run's
    object bucket."""

    object: str
    start: int
    stop: int


class Action(Message, frozen=True, kw_only=True):
    """Inference worker → environment worker, on ``act.<environment lane>.<episode>``, expecting the Observation's sequence.

    ``prompt_delta`` are the ids that this turn's messages became (little-endian ``u4``), ``sampled`` the ids that the policy
    sampled, ``logprobs`` one ``f4`` per sampled id under the sampling temperature. Trained on as they stand here.
    ``observation_sequence`` and ``hop`` say which delivery was answered. ``lane`` is the inference lane of ``worker``, where
    the episode's next observation goes. ``images`` are those that ``prompt_delta`` shows, in order.

    ``segment`` is the sequence that this turn belongs to, ``origin`` where it leaves its parent, in its first turn only. They
    are the Observation's, unless the worker had to begin a segment of its own: what an Action says holds.

    ``tool_call_errors`` has one line for each thing in the text that looked like a tool call and was none, where the model's
    own chat template described the tools.
    """

    episode_id: Name
    attempt: Count
    turn: Count
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_delta: bytes = b""
    sampled: bytes = b""
    logprobs: bytes = b""
    finish_reason: FinishReason = "stop"
    versions: tuple[VersionSpan, ...] = ()
    history_hash: Digest = b""
    worker: OptionalName = ""
    lane: OptionalName = ""
    error_class: str = ""
    error: str = ""
    hop: int = 0
    observation_sequence: int = 0
    seconds_queued: float = 0.0
    seconds_generating: float = 0.0
    images: tuple[ShownImage, ...] = ()
    segment: Count = 0
    origin: SegmentOrigin | None = None
    tool_call_errors: tuple[str, ...] = ()
