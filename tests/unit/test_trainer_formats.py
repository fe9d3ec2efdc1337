"""Episodes in the shapes of other trainers; with TRL installed (`just test-trl`), its own trainer takes a step on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbus.client.rollouts import Episode, SampledSequence
from fleetbus.client.trainer_formats import convert_to_trl, convert_to_verl
from fleetbus_schemas import Task


def episode(reward: float | None = 1.0, *, ids: tuple[int, ...] = (1, 2, 3, 4, 5, 6), sequences: int = 1) -> Episode:
    """Two prompt tokens, two sampled, one of the environment, one sampled."""
    sequence = SampledSequence(
        ids=ids, loss_mask=(False, False, True, True, False, True), logprobs=(0.0, 0.0, -0.5, -1.0, 0.0, -0.25)
    )
    return Episode(
        episode_id="e1",
        task=Task(key="t"),
        outcome="env_failed" if reward is None else "completed",
        reward=reward,
        turn_rewards=(),
        sequences=(sequence,) * sequences,
        texts=("a", "b"),
        policy_versions=(0,),
    )


def test_for_trl_prompt_and_completion_are_cut_at_the_first_sampled_token() -> None:
    assert convert_to_trl([episode()]) == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 5, 6]],
        "logprobs": [[-0.5, -1.0, 0.0, -0.25]],
        "env_mask": [[1, 1, 0, 1]],
        "episode_reward": [1.0],
    }


def test_for_verl_the_same_has_other_names() -> None:
    assert convert_to_verl(episode(0.5)) == {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5, 6],
        "response_mask": [1, 1, 0, 1],
        "response_logprobs": [-0.5, -1.0, 0.0, -0.25],
        "reward_score": 0.5,
        "num_turns": 4,
    }


def test_an_episode_without_a_reward_is_refused_by_its_id() -> None:
    with pytest.raises(ValueError, match="e1"):
        convert_to_trl([episode(), episode(None)])


def test_an_episode_of_several_sequences_is_refused_where_one_per_episode_is_taken() -> None:
    with pytest.raises(ValueError, match="episode e1 has 2 token sequences, because its context changed"):
        convert_to_trl([episode(sequences=2)])


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_trl_s_own_trainer_takes_a_step_on_them(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fleetbus_workers.starter.build import find_starter_folder

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        return convert_to_trl([episode(float(index % 2), ids=(1, 2, 3, 4, 5, 6 + index)) for index in range(len(prompts))])

    def reward(completions: Any, episode_reward: list[float], **_: Any) -> list[float]:
        return episode_reward

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(find_starter_folder()),
        processing_class=AutoTokenizer.from_pretrained(find_starter_folder()),
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_list([{"prompt": "play"}] * 4),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
    )
    outcome = trainer.train()
    assert outcome.global_step == 1
    assert trainer.state.log_history[0]["reward"] == 0.5
