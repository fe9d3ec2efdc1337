"""A run's environments as a gym of ms-swift: its engines sample, environment workers play.

A file for ``--external_plugins`` says ``import fleetbus_workers.trainers.ms_swift``; with ``--use_gym_env true`` and
``--multi_turn_scheduler gym_scheduler`` a row of the data set names its task:

    {"messages": [...], "env_config": {"name": "fleetbus", "task_key": "t1", "url": "nats://host:4222", "run": "r1",
                                       "tasks": "/data/tasks.json", "max_turns": 8}}

Needs ms-swift 4.6.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from swift.rollout.gym_env import Env, envs

from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import SpokenEpisode, join_texts


class FleetbusEnv(Env):  # type: ignore[misc]
    """One episode. ``max_turns`` has to be that of ms-swift, which tells no environment that it ends an episode: only then
    has that episode its verdict. A failure raises `EpisodeExcluded`: ms-swift has no row without a reward."""

    _episode: SpokenEpisode | None = None

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """The first user's text, nothing else to tell, and the system's text. Raises `EpisodeExcluded`, and `UserError`."""
        await self.close()
        if missing := {"tasks", "task_key", "max_turns"} - {*self.env_config}:
            raise UserError(f"a row's env_config lacks {', '.join(sorted(missing))}; max_turns is the --max_turns of ms-swift")
        given = {name: self.env_config[name] for name in ("url", "run", "max_turns", "timeout") if name in self.env_config}
        source = EpisodeSource.open(None, tasks=self.env_config["tasks"], **given)
        self._episode = source.speak(str(self.env_config["task_key"]))
        messages = await self._release(self._episode.start())
        system = [message for message in messages if message.role == "system"]
        return join_texts([message for message in messages if message.role != "system"]), {}, join_texts(system)

    async def step(self, action: Sequence[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        """One turn: the environment's text, its reward, whether the episode is over, why. Raises `EpisodeExcluded`."""
        assert self._episode is not None
        messages = await self._release(self._episode.say(action[-1]["content"]))
        info = {"stop_reason": self._episode.stop_reason}
        return join_texts(messages), self._episode.turn_rewards[-1], self._episode.is_over, info

    async def _release(self, call: Awaitable[tuple[ChatMessage, ...]]) -> tuple[ChatMessage, ...]:
        """The call's messages; when it fails the environment is free: ms-swift closes none that raises."""
        try:
            return await call
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Release the environment; harmless when repeated."""
        if self._episode is not None:
            await self._episode.close()


envs["fleetbus"] = FleetbusEnv
