"""PPO with a critic: what it makes of returns, that it learns to foresee them, and that a checkpoint holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fleetbus.config.check import check_configuration
from fleetbus.config.settings import AlgorithmSettings, Configuration, LearnerSettings
from fleetbus.core.training.groups import Group
from fleetbus.errors import UserError
from fleetbus_schemas import ActionReference, EpisodeFinished
from fleetbus_workers.learner.batches import CreditPlan, compute_episode_advantages
from fleetbus_workers.learner.torch.advantages import normalise
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.checkpoints import store
from tests.support.trainable_model import compute_distance, compute_gradient, make_sequence
from tests.support.trainer_settings import trainer_settings

PROMPT, RETURNS = 12, (1.0, 0.0, 1.0, 0.5, 0.0, 1.0)


@pytest.fixture(scope="module")
def batch() -> list[Any]:
    """Two turns each; the first sampled token tells how the episode will end."""
    draw, made = np.random.default_rng(0), []
    for index, reward in enumerate(RETURNS):
        ids = draw.integers(3, 60, PROMPT + 12).astype(np.int32)
        ids[PROMPT - 1 : PROMPT + 1] = 40 + int(4 * reward)
        mask = (np.arange(len(ids)) >= PROMPT) & ((np.arange(len(ids)) - PROMPT) // 4 != 1)
        made.append(make_sequence(index, ids, mask, logprobs=np.full(len(ids), -4.0), advantage=reward))
    return made


def make_trainer(folder: Path, **settings: Any) -> TorchTrainer:
    given = {"advantage_estimator": "gae", "micro_batch_size": 2, "learning_rate": 1e-3, "warmup_steps": 0}
    return TorchTrainer(folder, settings=trainer_settings(**(given | settings)))


def test_a_critic_that_knows_nothing_leaves_normalised_returns(folder: Path, batch: list[Any]) -> None:
    """Its head starts at 0; with lambda 1 the policy's gradient is that of returns, normalised over all tokens."""
    found = compute_gradient(make_trainer(folder), batch)
    expected = compute_gradient(TorchTrainer(folder, settings=trainer_settings(micro_batch_size=2)), normalise(batch))
    assert compute_distance(found, expected) < 1e-5


@pytest.mark.integration
def test_it_learns_to_foresee_returns_and_the_policy_is_moved_by_what_it_did_not_foresee(
    folder: Path, batch: list[Any]
) -> None:
    trainer = make_trainer(folder, value_clip=0.0, critic_rate=3.0)
    found = [trainer.train(batch, version=0, progress=0.0) for _ in range(40)]
    assert found[0]["value_mean"] == 0.0 and found[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[0]["return_mean"] == pytest.approx(np.mean(RETURNS))
    assert found[-1]["value_loss"] < 0.05 * found[0]["value_loss"]
    assert found[-1]["explained_variance"] > 0.9


@pytest.mark.integration
def test_a_checkpoint_holds_the_critic_and_a_version_does_not(folder: Path, batch: list[Any], tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    for _ in range(3):
        trainer.train(batch, version=0, progress=0.0)
    store(trainer, tmp_path / "checkpoint")
    published = {entry.name for entry in trainer.save_weights(tmp_path / "weights")}
    assert not any("critic" in name or "value_head" in name for name in published)
    following = trainer.train(batch, version=0, progress=0.0)

    again = make_trainer(folder)
    again.restore(tmp_path / "checkpoint")
    repeated = again.train(batch, version=0, progress=0.0)
    for each in (following, repeated):
        del each["seconds"]
    assert repeated == pytest.approx(following, nan_ok=True)
    for name, tensor in trainer._collect_state().items():
        assert torch.equal(again._collect_state()[name], tensor), name


def test_without_gae_there_is_no_critic(folder: Path, batch: list[Any]) -> None:
    trainer = TorchTrainer(folder, settings=trainer_settings())
    assert "value_loss" not in trainer.train(batch, version=0, progress=0.0)
    assert not any(name.startswith("critic.") for name in trainer._collect_state())


def test_sequences_that_are_masked_out_take_no_part(folder: Path, batch: list[Any]) -> None:
    silent = msgspec.structs.replace(
        batch[0], loss_mask=np.zeros_like(batch[0].loss_mask), advantages=np.zeros_like(batch[0].advantages)
    )
    found = make_trainer(folder).train([silent, *batch[1:]], version=0, progress=0.0)
    assert np.isfinite(found["value_loss"]) and found["return_mean"] == pytest.approx(np.mean(RETURNS[1:]))


def test_what_the_trainer_is_given_are_returns_by_turn() -> None:
    group = Group(group_id="g", size=1)
    references = tuple(ActionReference(sequence=index, lane="e", turn=index) for index in range(2))
    group.add(
        EpisodeFinished(
            episode_id="a", group_id="g", attempt=1, outcome="completed", worker="w", reward=3.0, turn_rewards=(1.0, 0.0),
            actions=references,
        )
    )  # fmt: skip
    whole = CreditPlan(advantage_estimator="gae")
    by_turn = CreditPlan(advantage_estimator="gae", credit_assignment="turn", turn_discount=0.5)
    assert compute_episode_advantages([group], whole) == [[3.0, 3.0]]
    assert compute_episode_advantages([group], by_turn) == [[1.0 + 0.5 * 2.0, 2.0]]


@pytest.mark.parametrize(
    "settings",
    [
        {"learner": LearnerSettings(advantage_estimator="gae", trainer="tinker")},
        {
            "learner": LearnerSettings(advantage_estimator="gae"),
            "algorithm": AlgorithmSettings(kl_coefficient=0.1, kl_place="reward"),
        },
    ],
)
def test_what_a_critic_does_not_go_with_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="gae"):
        check_configuration(Configuration(**settings))
