"""Environments of tinker-cookbook on a run's environments: Tinker, or a server that speaks its API, samples and trains.

    config = train.Config(dataset_builder=FleetbusDatasetBuilder(url=..., run="r1", tasks="tasks.json", ...), ...)

Needs tinker-cookbook 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chz
import tinker
from tinker_cookbook.rl.types import ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, SampledEpisode

STOP_REASONS = {"length": "max_tokens"}
"""The cookbook's names of reasons, where they are others."""


class FleetbusEnv(Env):  # type: ignore[misc]
    """One episode. `EpisodeExcluded` leaves its steps when the environment fails: with ``RetryOnFailure`` the cookbook plays it
    again, with its other strategies it leaves it out of the group, or ends."""

    def __init__(self, source: EpisodeSource, key: str) -> None:
        self._episode: SampledEpisode = source.episode(key)

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The prompt, and the ids that end a turn."""
        return tinker.ModelInput.from_ints(await self._episode.begin()), self._stop()

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """One turn; all that was said before is a prefix of the next observation."""
        await self._episode.step(action)
        episode = self._episode
        if episode.is_over:
            await self.close()
        return StepResult(
            reward=episode.turn_rewards[-1],
            episode_done=episode.is_over,
            next_observation=tinker.ModelInput.from_ints([] if episode.is_over else episode.ids),
            next_stop_condition=self._stop(),
            metrics={f"stop/{STOP_REASONS.get(episode.stop_reason, episode.stop_reason)}": 1.0} if episode.is_over else {},
        )

    async def grade(self) -> float:
        """The verdict on an episode that the cookbook's own limits ended, beyond the rewards of its turns; 0 where it is among
        them. Raises `EpisodeExcluded`."""
        episode = self._episode
        if episode.is_over or not episode.turn_rewards:
            return 0.0
        paid = sum(episode.turn_rewards)
        return await episode.grade() - paid

    async def close(self) -> None:
        """Release the environment; harmless when repeated."""
        await self._episode.close()

    def _stop(self) -> list[int]:
        return sorted(self._episode.template.stop_ids)


class FleetbusGroupBuilder(EnvGroupBuilder):  # type: ignore[misc]
    """``group_size`` episodes of one task. It can be pickled: the connection is made where the group is played."""

    def __init__(self, settings: dict[str, Any], key: str, group_size: int) -> None:
        self._settings, self._key, self._group_size = settings, key, group_size
        self._made: list[FleetbusEnv] = []

    async def make_envs(self) -> Sequence[FleetbusEnv]:
        source = _open_source(self._settings)
        envs = [FleetbusEnv(source, self._key) for _ in range(self._group_size)]
        self._made += envs
        return envs

    async def compute_group_rewards(
        self, trajectory_group: Sequence[Any], env_group: Sequence[FleetbusEnv]
    ) -> list[tuple[float, dict[str, float]]]:
        """A reward and no metrics for each of the group; see `FleetbusEnv.grade`."""
        return [(await env.grade(), {}) for env in env_group]

    async def cleanup(self) -> None:
        """Release what failed or was cancelled, side by side: with the server away each takes its time."""
        made, self._made = self._made, []
        async with open_first_error_task_group() as closing:
            for env in made:
                closing.start_soon(env.close)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": []}

    def logging_tags(self) -> list[str]:
        return ["fleetbus"]


class FleetbusDataset(RLDataset):  # type: ignore[misc]
    """All tasks once, in the order of their file, ``batch_size`` groups at a time."""

    def __init__(self, settings: dict[str, Any], keys: Sequence[str], *, batch_size: int, group_size: int) -> None:
        self._settings, self._keys, self._batch_size, self._group_size = settings, keys, batch_size, group_size

    def get_batch(self, index: int) -> Sequence[FleetbusGroupBuilder]:
        keys = self._keys[index * self._batch_size : (index + 1) * self._batch_size]
        return [FleetbusGroupBuilder(self._settings, key, self._group_size) for key in keys]

    def __len__(self) -> int:
        return -(-len(self._keys) // self._batch_size)


@chz.chz
class FleetbusDatasetBuilder(RLDatasetBuilder):  # type: ignore[misc]
    """``model_name`` is the tokenizer's; ``max_tokens`` bounds an episode after its prompt."""

    model_name: str
    tasks: str
    url: str = ""
    run: str = "default"
    batch_size: int = 16
    group_size: int = 8
    max_turns: int = 50
    max_tokens: int | None = None
    timeout: float = 600.0

    async def __call__(self) -> tuple[FleetbusDataset, None]:
        names = ("model_name", "tasks", "url", "run", "max_turns", "max_tokens", "timeout")
        settings = {name: getattr(self, name) for name in names}
        keys = list(_open_source(settings).tasks)
        return FleetbusDataset(settings, keys, batch_size=self.batch_size, group_size=self.group_size), None


def _open_source(settings: dict[str, Any]) -> EpisodeSource:
    bounds = {name: value for name, value in settings.items() if name != "model_name"}
    return EpisodeSource.open(get_tokenizer(settings["model_name"]), **bounds)
