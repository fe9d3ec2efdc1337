"""The rules of ATIF 1.8 that its JSON Schema and its model state, for tests that run without harbor."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

FIELDS = {
    "trajectory": {
        "schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "continued_trajectory_ref",
        "extra", "subagent_trajectories",
    },
    "agent": {"name", "version", "model_name", "tool_definitions", "extra"},
    "step": {
        "step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content", "tool_calls",
        "observation", "metrics", "is_copied_context", "llm_call_count", "extra",
    },
    "call": {"tool_call_id", "function_name", "arguments", "extra"},
    "result": {"source_call_id", "content", "subagent_trajectory_ref", "extra"},
    "metrics": {
        "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids", "completion_token_ids",
        "logprobs", "extra",
    },
    "final": {
        "total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_cost_usd", "total_steps", "extra"
    },
}  # fmt: skip
AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def check_trajectory(trajectory: dict[str, Any]) -> None:
    """Assert that all rules hold, in embedded trajectories too."""
    assert set(trajectory) <= FIELDS["trajectory"] and trajectory["schema_version"] == "ATIF-v1.8"
    assert set(trajectory["agent"]) <= FIELDS["agent"] and {"name", "version"} <= set(trajectory["agent"])
    assert set(trajectory.get("final_metrics", {})) <= FIELDS["final"]
    assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1)) != []
    inner = trajectory.get("subagent_trajectories", [])
    names = [each["trajectory_id"] for each in inner]
    assert len(set(names)) == len(names)
    for step in trajectory["steps"]:
        check_step(step)
    for each in inner:
        check_trajectory(each)


def check_step(step: dict[str, Any]) -> None:
    assert set(step) <= FIELDS["step"] and step["source"] in ("system", "user", "agent")
    assert step["source"] == "agent" or not set(AGENT_ONLY) & set(step)
    if "timestamp" in step:
        datetime.fromisoformat(step["timestamp"])
    check_content(step["message"])
    calls = step.get("tool_calls", [])
    assert all(set(call) <= FIELDS["call"] and isinstance(call["arguments"], dict) for call in calls)
    metrics = step.get("metrics", {})
    assert set(metrics) <= FIELDS["metrics"]
    for result in step.get("observation", {}).get("results", []):
        assert set(result) <= FIELDS["result"]
        check_content(result.get("content", ""))
        assert result.get("source_call_id") in (None, *(call["tool_call_id"] for call in calls))
        assert all("trajectory_id" in each or "trajectory_path" in each for each in result.get("subagent_trajectory_ref", []))


def check_content(content: Any) -> None:
    for part in () if isinstance(content, str) else content:
        if part["type"] == "text":
            assert set(part) == {"type", "text"}
        else:
            assert set(part) == {"type", "source"} and set(part["source"]) == {"media_type", "path"}


def list_exported_answers(trajectories: Iterable[dict[str, Any]], episode: str = "") -> dict[tuple[str, int], Any]:
    """Of each answer that is no copied context, by episode and turn: prompt ids, sampled ids, log-probabilities."""
    found: dict[tuple[str, int], Any] = {}
    for trajectory in trajectories:
        name = episode or trajectory["trajectory_id"]
        for step in trajectory["steps"]:
            if step["source"] == "agent" and not step.get("is_copied_context"):
                metrics = step["metrics"]
                key = name, step["extra"]["turn"]
                assert key not in found
                found[key] = metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics["logprobs"]
        found |= list_exported_answers(trajectory.get("subagent_trajectories", []), name)
    return found
