"""The trainer's account of each trained token: its log-probability before, the gradient that it had, and if it was clipped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, TrainerSettings
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import make_model, make_sequence

LENGTH, PROMPT = 20, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_batch(trainer: TorchTrainer, *, shift: float = 0.0) -> list:
    """Four sequences, the last without an advantage, whose sampler was ``shift`` nats below the trainer."""
    rng, batch = np.random.default_rng(0), []
    mask = np.arange(LENGTH) >= PROMPT
    for index, advantage in enumerate((1.0, -1.0, 0.5, 0.0)):
        ids = rng.integers(5, 60, LENGTH).astype(np.int32)
        batch.append(make_sequence(index, ids, mask, logprobs=np.zeros(LENGTH), advantage=advantage))
    known = trainer.compute_logprobs(batch)
    return [
        msgspec.structs.replace(each, logprobs=np.concatenate([np.zeros(PROMPT), own.numpy() - shift]).astype(np.float32))
        for each, own in zip(batch, known, strict=True)
    ]


def build(folder: Path, **tables: object) -> TorchTrainer:
    learner = LearnerSettings(**tables.pop("learner", {}))  # type: ignore[arg-type]
    return TorchTrainer(folder, settings=TorchTrainerSettings(learner=learner, **tables))  # type: ignore[arg-type]


def test_each_trained_token_has_the_logprob_from_before_the_update(folder: Path) -> None:
    trainer = build(folder)
    batch = make_batch(trainer)
    before = trainer.compute_logprobs(batch)

    trainer.train(batch, version=3, progress=0.5)

    assert [each.episode_id for each in trainer.traced_tokens] == ["e0", "e1", "e2", "e3"]
    for traced, expected in zip(trainer.traced_tokens, before, strict=True):
        np.testing.assert_allclose(traced.logprobs, expected.numpy(), atol=1e-5)
        assert traced.places.tolist() == list(range(PROMPT, LENGTH))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_gradients_of_tokens_are_those_of_the_loss(folder: Path, reduction: str) -> None:
    """Unclipped and on policy the gradient of a token is its advantage over the denominator of the reduction."""
    trainer = build(folder, algorithm=AlgorithmSettings(reduction=reduction))  # type: ignore[arg-type]
    batch = make_batch(trainer)

    trainer.train(batch, version=3, progress=0.5)

    sampled = LENGTH - PROMPT
    for traced, sequence in zip(trainer.traced_tokens, batch, strict=True):
        expected = sequence.advantages[sequence.loss_mask] / (len(batch) * sampled)
        np.testing.assert_allclose(traced.gradients, expected, rtol=1e-4, atol=1e-9)
        assert not traced.clipped.any()


def test_a_clipped_token_says_so_and_has_no_gradient(folder: Path) -> None:
    trainer = build(folder)
    batch = make_batch(trainer, shift=1.0)

    trainer.train(batch, version=3, progress=0.5)

    raised, lowered, _, _ = trainer.traced_tokens
    assert raised.clipped.all() and not raised.gradients.any()
    assert not lowered.clipped.any() and (lowered.gradients < 0).all()


def test_several_epochs_add_up_their_gradients_and_keep_the_first_logprob(folder: Path) -> None:
    trainer = build(folder, trainer=TrainerSettings(epochs=3))
    batch = make_batch(trainer)
    before = trainer.compute_logprobs(batch)

    trainer.train(batch, version=3, progress=0.5)

    once = 1.0 / (len(batch) * (LENGTH - PROMPT))
    first = trainer.traced_tokens[0]
    np.testing.assert_allclose(first.logprobs, before[0].numpy(), atol=1e-5)
    assert np.all(first.gradients > 2.5 * once)


def test_a_leaf_s_tokens_are_placed_among_those_of_its_episode(folder: Path) -> None:
    trainer = build(folder, trainer=TrainerSettings(max_tokens=LENGTH - 2))
    first, *others = make_batch(trainer)
    leaf = msgspec.structs.replace(first, places=100 + np.arange(LENGTH))

    trainer.train([leaf, *others], version=3, progress=0.5)

    assert trainer.traced_tokens[0].places.tolist() == list(range(100 + PROMPT, 100 + LENGTH - 2))


def test_nothing_is_noted_when_no_record_is_kept(folder: Path) -> None:
    trainer = build(folder, learner={"keep_token_records": 0})
    with torch.no_grad():
        batch = make_batch(trainer)

    trainer.train(batch, version=3, progress=0.5)

    assert trainer.traced_tokens == []
