"""SkyRL's rows for episodes that failed: not trained, and their group's mean stays. SkyRL itself is played by
tests/clients/test_trainers.py; here its base class is a stand-in.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded
from tests.support.trainer_stand_ins import load_adapter


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    members = {"GeneratorInterface": object, "GeneratorInput": dict, "GeneratorOutput": dict}
    return load_adapter(monkeypatch, "skyrl", {"skyrl.train.generators.base": members})


class Source:
    """Plays a task by its key, which is the reward, or "failed"."""

    async def play(self, key: str, sample: Any) -> Any:
        if key == "failed":
            raise EpisodeExcluded("the browser is gone")
        return SimpleNamespace(
            prompt_ids=[1, 2],
            response_ids=[3, 4, 5],
            response_mask=[1, 0, 1],
            response_logprobs=[-0.5, 0.0, -0.5],
            reward=float(key),
            stop_reason="completed",
        )


async def generate(module: ModuleType, keys: list[str], groups: str, given: dict[str, Any] | None = None) -> Any:
    generator = module.FleetbusGenerator.__new__(module.FleetbusGenerator)
    generator._source, generator._sampling = Source(), SimpleNamespace(logprobs=1)
    return await generator.generate(
        {
            "prompts": [[]] * len(keys),
            "env_extras": [{"task_key": key} for key in keys],
            "trajectory_ids": [SimpleNamespace(instance_id=group) for group in groups],
            "sampling_params": given,
        }
    )


async def test_a_failed_row_is_not_trained_and_has_the_mean_of_its_groups_other_rewards(module: ModuleType) -> None:
    output = await generate(module, ["1.0", "failed", "0.5", "4.0"], "aaab")
    assert output["rewards"] == [1.0, 0.75, 0.5, 4.0]
    assert output["loss_masks"][1] == [0] and output["rollout_logprobs"][1] == [0.0]
    assert len(output["response_ids"][1]) == 1
    assert output["stop_reasons"][1] == "env_failed"
    assert output["rollout_metrics"] == {"generate/excluded": 1.0}


async def test_a_group_of_failures_alone_has_the_mean_of_the_batch_and_no_token_that_is_trained(module: ModuleType) -> None:
    output = await generate(module, ["failed", "failed", "1.0", "2.0"], "aabb")
    assert output["rewards"] == [1.5, 1.5, 1.0, 2.0]
    assert output["loss_masks"][:2] == [[0], [0]]


async def test_log_probabilities_are_handed_on_where_the_batch_or_else_the_configuration_asks_for_them(
    module: ModuleType,
) -> None:
    assert (await generate(module, ["1.0"], "a"))["rollout_logprobs"] == [[-0.5, 0.0, -0.5]]
    assert (await generate(module, ["1.0"], "a", {"logprobs": 0}))["rollout_logprobs"] is not None
    assert (await generate(module, ["1.0"], "a", {"logprobs": None}))["rollout_logprobs"] is None


async def test_an_episode_ends_where_skyrls_own_would(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(module.EpisodeSource, "open", lambda tokenizer, **bounds: opened.update(bounds))
    config = SimpleNamespace(max_turns=3, max_input_length=512, sampling_params=SimpleNamespace(logprobs=1))
    module.FleetbusGenerator(config, None, None, tasks="tasks.json")
    assert (opened["max_turns"], opened["max_context"]) == (3, 512)


async def test_a_batch_of_failures_alone_is_an_error_with_their_reason(module: ModuleType) -> None:
    with pytest.raises(EpisodeExcluded, match="no episode of 2 was played: the browser is gone"):
        await generate(module, ["failed", "failed"], "aa")
