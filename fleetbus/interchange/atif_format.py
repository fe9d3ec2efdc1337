"""The Agent Trajectory Interchange Format, ATIF 1.8, as structs: those fields that episodes have. Unknown fields are ignored.

A file is foreign data: sizes are bounded, and what does not fit the format is one `UserError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

VERSION = "ATIF-v1.8"

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
MediaType = Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
MEDIA_TYPES: tuple[MediaType, ...] = ("image/jpeg", "image/png", "image/gif", "image/webp")

OBJECT_PATH = "urn:sha256:"
"""Before the name of an object of the run's bucket, as the path of an image."""


class Source(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The place of an image or of a sound."""

    media_type: str
    path: str


class Content(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message that is more than text."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: Source | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call of a tool."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class SubagentReference(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The trajectory of an agent that worked for this one."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None
    extra: dict[str, Any] | None = None


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of a call, or what the environment said otherwise."""

    source_call_id: str | None = None
    content: str | list[Content] | None = None
    subagent_trajectory_ref: list[SubagentReference] | None = None
    extra: dict[str, Any] | None = None


class Observation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The results that a step had."""

    results: list[Result]


class Metrics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of one answer; ``prompt_token_ids`` are those of the whole prompt."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[TokenId] | None = None
    completion_token_ids: list[TokenId] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class Step(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the system or of a user, or an answer of the agent with its calls and their results."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[Content]
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class Agent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The agent, its model, and the tools that it has."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class FinalMetrics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sums over a trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_steps: int | None = None


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One conversation of an agent; those of its sub-agents stand in it."""

    schema_version: Annotated[str, msgspec.Meta(pattern=r"^ATIF-v1\.\d{1,3}$")]
    agent: Agent
    steps: Annotated[list[Step], msgspec.Meta(min_length=1, max_length=10_000)]
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: Annotated[list[Trajectory], msgspec.Meta(max_length=1_000)] | None = None
