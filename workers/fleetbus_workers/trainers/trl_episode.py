"""Episodes as the environments of TRL's ``environment_factory``: objects that it resets, whose public methods are tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from fleetbus.errors import FleetbusError, UserError
from fleetbus_schemas import ChatMessage, MalformedMessage, ToolSpec
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded, EpisodeUnanswered, SpokenEpisode, join_texts
from fleetbus_workers.trainers.trl_tools import build_methods

log = structlog.get_logger()

SAY = ToolSpec(
    "say",
    "Say something to the environment, and read its answer.",
    {"properties": {"text": {"type": "string", "description": "What to say."}}, "required": ["text"]},
)
"""The tool of an environment that has none and reads texts."""

OVER = "The episode is over."
DONE = " <done>"
"""The end of a last answer, as environments are told it whose own prompt, which TRL's model does not see, asks for it."""

UNANSWERED_CALLS = 2
"""After so many in a row no worker is waited for in the batch: TRL makes one call after another."""


class TrlEnvironment:
    """One episode after another, as TRL resets it. Subclasses have a method per tool; TRL takes each public one for a tool.
    ``failure`` says why the present episode has no reward; empty if it may have one."""

    _tools: tuple[ToolSpec, ...] = ()
    _unanswered = 0
    """Calls in a row of all environments of the class."""

    def __init__(self, source: EpisodeSource) -> None:
        self._source = source
        self._episode: SpokenEpisode | None = None
        self.failure = ""

    def reset(self, task_key: str = "", **row: Any) -> str:
        """Begin an episode of this task; what the environment says first is appended to the prompt. Raises `UserError`, and
        `EpisodeUnanswered` if no environment worker answers."""
        if not task_key:
            raise UserError("a row of the data set has no task_key: give train_dataset=environments.dataset")
        self._release()
        self._episode, self.failure = None, ""
        try:
            self._episode, messages = self._source.client.call(begin, self._source, task_key)
        except EpisodeUnanswered as error:
            raise EpisodeUnanswered(
                f"{error}; TRL begins a batch of episodes at once, and each takes one of environment.session_slots"
            ) from error
        except EpisodeExcluded as excluded:
            self._fail(excluded)
            return ""
        type(self)._unanswered = 0
        self._check_tools(task_key, self._episode)
        try:
            return _read_start(messages[self._episode.prompted :])
        except ValueError as error:
            self._fail(error)
            return ""

    def _check_tools(self, key: str, episode: SpokenEpisode) -> None:
        tools, expected = ([tool.name for tool in each] for each in (episode.tools or (SAY,), self._tools))
        if sorted(tools) != sorted(expected):
            raise UserError(f"task {key} has tools {tools}, and others of its env_key have {expected}: give it another env_key")

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool's output. Raises `EpisodeExcluded`, which TRL shows to the model: the episode has no reward any more; and
        `ValueError` for arguments that no message can carry, which is the model's own mistake."""
        if self.failure or self._episode is None:
            raise EpisodeExcluded(self.failure or "the episode has not begun")
        if self._episode.is_over:
            return OVER
        try:
            if self._unanswered >= UNANSWERED_CALLS:
                raise EpisodeUnanswered("no environment worker answered other calls of the batch")
            said = self._source.client.call(self._take_turn, self._episode, name, dict(arguments))
        except MalformedMessage as malformed:
            raise ValueError(f"these arguments cannot be sent: {malformed.reason}") from malformed
        except Exception as error:
            type(self)._unanswered += isinstance(error, EpisodeUnanswered)
            self._fail(error)
            raise
        type(self)._unanswered = 0
        return said

    async def _take_turn(self, episode: SpokenEpisode, name: str, arguments: dict[str, Any]) -> str:
        if not episode.tools:
            said = join_texts(await episode.say(str(arguments.get("text", ""))))
        else:
            answer = await episode.call_tool(name, arguments)
            said = answer.output.text if answer.output is not None else join_texts(answer.messages)
        if episode.is_over:
            await episode.close()
        return said or (OVER if episode.is_over else said)

    async def _finish(self, completion: Sequence[Mapping[str, Any]]) -> float | None:
        """The reward of the episode, None if it has failed; the environment is free in any case."""
        episode = self._episode
        if episode is None:
            return None
        try:
            return None if self.failure else await _grade(episode, completion[-1] if completion else {})
        except (FleetbusError, MalformedMessage) as error:
            self._fail(error)
            return None
        finally:
            await episode.close()

    def _release(self) -> None:
        """Close an episode that was never graded."""
        if self._episode is not None:
            self._source.client.call(self._episode.close)

    def _fail(self, error: Exception) -> None:
        self.failure = str(error) or type(error).__name__
        log.warning("episode failed; it has no reward", reason=self.failure)


def _read_start(messages: Sequence[ChatMessage]) -> str:
    """Raises `ValueError`."""
    if roles := {message.role for message in messages} - {"system", "user"}:
        raise ValueError(f"it begins with messages of role {min(roles)}: TRL's environments begin with one text")
    return join_texts(messages)


async def _grade(episode: SpokenEpisode, last: Mapping[str, Any]) -> float | None:
    """The reward, after the policy's last message as a turn: calls in it are those that TRL did not execute any more."""
    answered = last.get("role") == "assistant" and not last.get("tool_calls")
    if not episode.is_over and (answered or not episode.turn_rewards):
        await episode.say(_read_text(last) + (DONE if episode.prompted else ""))
    if not episode.is_over:
        await episode.grade()
    return episode.reward


def _read_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def build_class(source: EpisodeSource, key: str) -> type[TrlEnvironment]:
    """The class of environments with the tools of this task, an episode of which is begun and closed for it. Raises
    `EpisodeExcluded`, and `UserError`."""

    async def look() -> tuple[ToolSpec, ...]:
        episode, _ = await begin(source, key)
        await episode.close()
        return episode.tools or (SAY,)

    tools = source.client.call(look)
    return type("FleetbusEnvironment", (TrlEnvironment,), build_methods(tools, TrlEnvironment._call_tool) | {"_tools": tools})


async def begin(source: EpisodeSource, key: str) -> tuple[SpokenEpisode, tuple[ChatMessage, ...]]:
    """An episode and its first messages; one that cannot begin is begun again, as often as the source says. Raises
    `EpisodeExcluded`, `EpisodeUnanswered` at once, and `UserError` for an unknown key."""
    for left in reversed(range(1 + source.retries)):
        episode = source.speak(key)
        try:
            return episode, await episode.start()
        except BaseException as error:
            await episode.close()
            if not left or not isinstance(error, EpisodeExcluded) or isinstance(error, EpisodeUnanswered):
                raise
            log.warning("episode failed; beginning another", task=key, reason=str(error))
    raise AssertionError("unreachable")
