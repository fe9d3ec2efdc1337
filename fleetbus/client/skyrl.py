"""An environment class for SkyRL's generators: episodes on environments of the bus, with the texts that those give.

    skyrl_gym.register(id="fleetbus", entry_point="fleetbus.client.skyrl:FleetbusEnv")

``env_config``: ``nats_url`` (or the variable ``FLEETBUS_NATS_URL``), ``run`` ("default"), ``tasks_file``, ``timeout`` (seconds
per call, 600); a server that wants a key gets that of ``FLEETBUS_NATS_AUTH``. ``extras``: ``task_key``, ``max_turns`` (50),
``tasks_file`` where the config has none. Returns what ``skyrl_gym`` 0.4's `BaseTextEnv` returns; the same calls exist as
coroutines. Needs the extra ``skyrl``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from fleetbus.client.blocking import SharedClient, get_shared_client
from fleetbus.client.contexts import describe_context
from fleetbus.client.sessions import Session, SessionFailed, SessionUnavailable
from fleetbus.tasks.files import load_tasks_by_key
from fleetbus_schemas import ChatMessage, SessionAnswer, Task
from fleetbus_schemas.chat import Text

MAX_TURNS = 50
TIMEOUT_SECONDS = 600.0


class FleetbusEnv(BaseTextEnv):  # type: ignore[misc]  # skyrl_gym has no types
    """One episode at a time. A failed environment ends the episode with ``training_usable`` False, and is no reward of 0."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        config, extras = env_config or {}, extras or {}
        self.max_turns = int(extras.get("max_turns") or MAX_TURNS)
        self._task = _find_task(config, extras)
        self._url = str(config.get("nats_url") or os.environ.get("FLEETBUS_NATS_URL", ""))
        if not self._url:
            raise ValueError("nats_url must be set in env_config, or FLEETBUS_NATS_URL in the environment")
        self._run = str(config.get("run") or "default")
        self._timeout = float(config.get("timeout") or TIMEOUT_SECONDS)
        self._session: Session | None = None
        self._shared: SharedClient | None = None
        self._counts = {"tool_calls": 0, "tool_errors": 0}
        self._final_reward: float | None = None

    # What skyrl_gym calls, from threads

    def init(self, prompt: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The environment's own prompt (the given one is not used) and ``task_key``, ``env_key``, ``tools``, ``modality``."""
        return self._client().call(self._init)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """One turn: ``observations`` (none once the turns are used up), ``reward``, ``done``, ``metadata``."""
        return self._client().call(self._step, action)

    def close(self) -> None:
        """Release the environment; harmless when repeated, or before `init`."""
        if self._session is not None:
            self._client().call(self._close)

    # The same for generators that await

    async def init_async(self, prompt: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return await self._client().wait(self._init)

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        return await self._client().wait(self._step, action)

    async def close_async(self) -> None:
        if self._session is not None:
            await self._client().wait(self._close)

    def get_metrics(self) -> dict[str, Any]:
        metrics = {"task_key": self._task.key, "env_key": self._task.env, "turns": self.turns, **self._counts}
        return metrics if self._final_reward is None else metrics | {"final_reward": self._final_reward}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Turns, tool calls and tool errors over all episodes, and per environment under ``<env_key>/``."""
        by_environment: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for each in metrics:
            by_environment[str(each.get("env_key") or "unknown")].append(each)
        metrics_by_name: dict[str, Any] = {}
        for name, episodes in by_environment.items():
            turns = [episode.get("turns", 0) for episode in episodes]
            metrics_by_name |= {f"{name}/{key}": value for key, value in _compute_totals(episodes).items()}
            metrics_by_name |= {
                f"{name}/min_turns": min(turns),
                f"{name}/max_turns": max(turns),
                f"{name}/num_episodes": len(episodes),
            }
        return metrics_by_name | _compute_totals(metrics) | {"total_episodes": len(metrics)} if metrics else {}

    # On the loop that all environments of this process share

    async def _init(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        await self._close()
        self.turns = 0
        self._counts = {"tool_calls": 0, "tool_errors": 0}
        self._final_reward = None
        session = self._session = self._client().session(timeout=self._timeout)
        try:
            await session.request("open", task=self._task)
            start = await session.reset()
        except (SessionFailed, SessionUnavailable) as error:
            await self._close()
            raise RuntimeError(f"task {self._task.key}: {error}") from error
        tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in start.tools]
        metadata = {
            "task_key": self._task.key,
            "env_key": self._task.env,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "modality": self._task.modality,
        }
        return [_build_chat_message(message) for message in start.messages], metadata

    async def _step(self, action: str) -> BaseTextEnvStepOutput:
        if self._session is None:
            raise RuntimeError("init comes before the first step")
        self.turns += 1
        metadata: dict[str, Any] = {"task_key": self._task.key, "turn": self.turns}
        try:
            answer = await self._session.step(action)
            ended = "agent_done" if answer.terminated else "truncated" if answer.truncated else None
            used_up = self.turns >= self.max_turns and ended is None
            self._count(answer, metadata)
            metadata["info"] = answer.state | describe_context(answer.context)
            reward = answer.reward or 0.0
            if ended or used_up:
                reward += await self._unpaid(metadata)
        except (SessionFailed, SessionUnavailable) as error:
            metadata |= {"error": str(error), "done_reason": "env_failed", "training_usable": False}
            return _build_output([], 0.0, True, metadata)
        metadata["done_reason"] = "max_turns" if used_up else ended
        observations = [] if used_up else [_build_chat_message(message) | {"role": "user"} for message in answer.messages]
        return _build_output(observations, reward, bool(ended or used_up), metadata)

    async def _unpaid(self, metadata: dict[str, Any]) -> float:
        """The part of the verdict that the steps were not rewarded."""
        assert self._session is not None
        verdict = await self._session.verify()
        if verdict.unpaid is None:
            metadata |= {"training_usable": False, "error": verdict.reason or "no verdict"}
            return 0.0
        self._final_reward = verdict.reward
        return verdict.unpaid

    def _count(self, answer: SessionAnswer, metadata: dict[str, Any]) -> None:
        self._counts["tool_calls"] += answer.tool_calls
        self._counts["tool_errors"] += answer.tool_errors
        metadata |= {"tool_calls": answer.tool_calls, "tool_errors": answer.tool_errors}

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):  # bounded by the close's own limit
                await session.close()

    def _client(self) -> SharedClient:
        if self._shared is None:
            self._shared = get_shared_client(self._url, self._run)
        return self._shared


def _find_task(config: Any, extras: Mapping[str, Any]) -> Task:
    key = extras.get("task_key")
    if not key:
        raise ValueError("task_key must be provided in extras (from dataset)")
    file = config.get("tasks_file") or extras.get("tasks_file")
    if not file:
        raise ValueError("tasks_file must be provided in env_config or extras")
    path = Path(str(file)).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"Tasks file not found: {path}")
    tasks = load_tasks_by_key(path)
    if key not in tasks:
        raise ValueError(f"Task '{key}' not found in {path}. Available keys (first 5): {list(tasks)[:5]}")
    return tasks[key]


def _build_chat_message(message: ChatMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    text = "".join(part.text if isinstance(part, Text) else "<image>" for part in message.content)
    return {"role": message.role, "content": text}


def _build_output(
    observations: list[dict[str, Any]], reward: float, done: bool, metadata: dict[str, Any]
) -> BaseTextEnvStepOutput:
    return BaseTextEnvStepOutput(
        observations=observations, reward=reward, done=done, metadata=metadata, postprocessed_action=None
    )


def _compute_totals(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    count = len(episodes)
    turns, calls, errors = (
        sum(episode.get(name, 0) for episode in episodes) for name in ("turns", "tool_calls", "tool_errors")
    )
    return {
        "avg_turns": turns / count,
        "avg_tool_calls": calls / count,
        "tool_calls_per_turn": calls / turns if turns else 0.0,
        "avg_tool_errors": errors / count,
        "total_tool_errors": errors,
        "tool_error_rate": errors / calls if calls else 0.0,
    }
