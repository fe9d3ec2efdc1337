"""An episode on a run's environment in texts, for trainers that sample and tokenise themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from fleetbus.client.sessions import Session, SessionFailed, SessionUnavailable
from fleetbus.core.algorithms.reward_components import find_reward_problem
from fleetbus.errors import FleetbusError
from fleetbus_schemas import ChatMessage, SessionAnswer, Task, ToolCall, ToolSpec
from fleetbus_schemas.chat import Text

if TYPE_CHECKING:
    from fleetbus_workers.trainers.sampled_episode import EpisodeSource


class EpisodeExcluded(FleetbusError):
    """The environment failed, or there is no verdict: the episode has no reward, and 0 would be a wrong one."""


class EpisodeUnanswered(EpisodeExcluded):
    """No environment worker answered in time."""


class SpokenEpisode:
    """One episode in messages and texts. ``turn_rewards`` sum to ``reward``, which is None before the end. ``tools`` are the
    environment's, and its first ``prompted`` messages tell of them."""

    def __init__(self, source: EpisodeSource, task: Task) -> None:
        self._source, self._task = source, task
        self._session: Session = source.client.session(timeout=source.timeout)
        self.is_open = False
        self.turn_rewards: list[float] = []
        self.tools: tuple[ToolSpec, ...] = ()
        self.prompted = 0
        self.is_over = False
        self.stop_reason = ""

    @property
    def reward(self) -> float | None:
        return sum(self.turn_rewards) if self.is_over else None

    async def start(self) -> tuple[ChatMessage, ...]:
        """The messages that the policy sees first. Raises `EpisodeExcluded`."""
        self.is_open = True
        await self._call(partial(self._session.request, "open", task=self._task))
        answer = await self._call(self._session.reset)
        self.tools, self.prompted = answer.tools, answer.prompted
        return answer.messages

    async def say(self, text: str) -> tuple[ChatMessage, ...]:
        """One turn, and what the environment says; an episode that is over has been graded. Raises `EpisodeExcluded`."""
        return (await self._take_turn(partial(self._session.step, text))).messages

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> SessionAnswer:
        """The same, the turn being the call of a tool; ``output`` is what it gave, where the environment tells it apart."""
        call = ToolCall(name=name, arguments=arguments)
        return await self._take_turn(partial(self._session.request, "step", tool_calls=(call,)))

    async def _take_turn(self, turn: Callable[[], Awaitable[SessionAnswer]]) -> SessionAnswer:
        answer = await self._call(turn)
        self.turn_rewards.append(self._check_reward(answer.reward or 0.0))
        ended = "completed" if answer.terminated else "truncated" if answer.truncated else ""
        if not ended and len(self.turn_rewards) >= self._source.max_turns:
            ended = "max_turns"
        if ended:
            await self.grade(ended)
        return answer

    async def grade(self, reason: str = "length") -> float:
        """End the episode, for this reason, and return its reward. Raises `EpisodeExcluded`."""
        verdict = await self._call(self._session.verify)
        if verdict.unpaid is None:
            raise EpisodeExcluded(f"task {self._task.key} has no verdict: {verdict.reason}")
        self.turn_rewards[-1] += self._check_reward(verdict.unpaid, 1 + len(self.turn_rewards))
        self.stop_reason, self.is_over = reason, True
        return sum(self.turn_rewards)

    def _check_reward(self, reward: float, parts: int = 1) -> float:
        """A sum or difference of so many rewards. A worker checks its own; one that does not would make a whole batch NaN.
        Raises `EpisodeExcluded`."""
        if problem := find_reward_problem([reward], parts * self._source.max_abs_reward):
            raise EpisodeExcluded(f"task {self._task.key} was rewarded {reward:g}: {problem}")
        return reward

    async def close(self) -> None:
        """Release the environment; harmless when repeated, or before the start."""
        if not self.is_open:
            return
        self.is_open = False
        with anyio.CancelScope(shield=True):  # bounded by the close's own limit
            await self._source.client.wait(self._session.close)

    async def _call(self, function: Callable[..., Awaitable[SessionAnswer]], *args: Any) -> SessionAnswer:
        try:
            return await self._source.client.wait(function, *args)
        except SessionUnavailable as error:
            raise EpisodeUnanswered(f"task {self._task.key}: {error}") from error
        except SessionFailed as error:
            raise EpisodeExcluded(f"task {self._task.key}: {error}") from error


def join_texts(messages: Sequence[ChatMessage]) -> str:
    """The texts of messages, a line each. Raises `ValueError` for one that shows an image."""
    texts = []
    for message in messages:
        parts = (Text(text=message.content),) if isinstance(message.content, str) else message.content
        if not all(isinstance(part, Text) for part in parts):
            raise ValueError("the environment shows an image, and texts alone are exchanged")
        texts += [part.text for part in parts if isinstance(part, Text)]
    return "\n".join(texts)
