"""The torch trainer on a tiny random model: exact gradients, exact continuation, and what it measures."""

import hashlib
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GenerationConfig, LlamaConfig

from fleetbus.errors import UserError
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.batches import find_shared_prefix, split_micro_batches
from fleetbus_workers.learner.torch.forward import can_share_prefix, has_plain_head
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.checkpoints import store
from tests.support.trainable_model import (
    CONFIGS,
    LAYERS,
    SIZES,
    VOCABULARY,
    compute_distance,
    compute_gradient,
    compute_logprobs,
    make_model,
    make_sequence,
)
from tests.support.trainer_settings import trainer_settings

PREFIX = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"kept": true}')
    (folder / "chat_template.jinja").write_text("template")
    return folder


def make_batch(folder, *, count=10, seed=0, off_policy=0.0, temperature=1.0, version=3, advantages=None):
    """Two sampled turns each after a common prefix; the model's own log-probabilities, disturbed by ``off_policy``."""
    draw = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prefix = draw.integers(3, VOCABULARY, PREFIX)
    batch = []
    for index in range(count):
        length = int(draw.integers(20, 40))
        ids = np.concatenate([prefix, draw.integers(3, VOCABULARY, length)]).astype(np.int32)
        mask = np.zeros(len(ids), np.bool_)
        mask[PREFIX + 4 : PREFIX + 9] = mask[PREFIX + 12 :] = True
        logprobs = np.concatenate([[0.0], compute_logprobs(model, ids, temperature)])
        logprobs[1:] += off_policy * draw.normal(size=len(ids) - 1)
        advantage = draw.normal() if advantages is None else advantages[index]
        batch.append(
            make_sequence(
                index,
                ids,
                mask,
                logprobs=logprobs,
                advantage=advantage,
                group=f"g{index // 2}",
                version=version,
                temperature=temperature,
            )
        )
    return batch


def weights(trainer, tmp_path, name="weights.safetensors"):
    """Their digest: pytest compares bytes that differ for minutes, one by one."""
    trainer.save_weights(tmp_path / name)
    return hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


SMALL = {"max_grad_norm": 1e9, "micro_batch_size": 4}


def plain_gradient(folder, batch):
    """The gradient of the clipped objective by one forward pass per whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
    for sequence in batch:
        ids, mask = torch.from_numpy(sequence.ids.astype(np.int64)), torch.from_numpy(sequence.loss_mask)
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0][mask[1:]]
        ratio = torch.exp(logprobs - torch.from_numpy(sequence.logprobs)[mask])
        advantages = torch.from_numpy(sequence.advantages)[mask]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (losses.sum() / tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_that_of_plain_forward_passes_over_whole_sequences(folder):
    batch = make_batch(folder, off_policy=0.3)

    shared = compute_gradient(TorchTrainer(folder, settings=trainer_settings(**SMALL)), batch)

    assert compute_distance(shared, plain_gradient(folder, batch)) <= 1e-5


MORE = {**SIZES, "bos_token_id": 1, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "shares", "plain_head"),
    [
        (LlamaConfig(**MORE, **LAYERS, tie_word_embeddings=False), True, True),
        (CONFIGS["gpt2"], True, True),
        (Gemma2Config(**MORE, **LAYERS, sliding_window=8, query_pre_attn_scalar=16), False, False),
    ],
    ids=["llama", "gpt2", "gemma2: windows, soft caps"],
)
def test_other_architectures_get_their_exact_gradient_too(tmp_path, config, shares, plain_head):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    batch = make_batch(tmp_path, count=4, off_policy=0.3)
    trainer = TorchTrainer(tmp_path, settings=trainer_settings(**SMALL))

    assert (can_share_prefix(trainer._model), has_plain_head(trainer._model)) == (shares, plain_head)
    assert compute_distance(compute_gradient(trainer, batch), plain_gradient(tmp_path, batch)) <= 1e-5


def test_a_sequence_without_sampled_tokens_does_no_harm(folder):
    batch = make_batch(folder, count=2)
    silent = TrainingSequence(
        episode_id="silent",
        group_id="g",
        ids=batch[0].ids,
        loss_mask=np.zeros_like(batch[0].loss_mask),
        logprobs=np.zeros_like(batch[0].logprobs),
        advantages=np.zeros_like(batch[0].advantages),
        versions=np.full_like(batch[0].versions, -1),
    )
    trainer = TorchTrainer(folder, settings=trainer_settings(**SMALL))

    assert compute_distance(compute_gradient(trainer, [silent, *batch]), compute_gradient(trainer, batch)) <= 1e-5
    assert trainer.train([silent], version=3, progress=0.0)["tokens"] == 0.0


@pytest.mark.parametrize("choice", [{"share_prefix": False}, {"micro_batch_size": 1}, {"micro_batch_size": 64}])
def test_how_the_batch_is_cut_does_not_change_the_gradient(folder, choice):
    batch = make_batch(folder, off_policy=0.3)
    usual = compute_gradient(TorchTrainer(folder, settings=trainer_settings(**SMALL)), batch)

    other = compute_gradient(TorchTrainer(folder, settings=trainer_settings(**{**SMALL, **choice})), batch)

    assert compute_distance(other, usual) <= 1e-5


def test_the_order_of_the_batch_does_not_change_the_gradient(folder):
    batch = make_batch(folder, off_policy=0.3)
    trainer = TorchTrainer(folder, settings=trainer_settings(**SMALL))

    assert compute_distance(compute_gradient(trainer, batch[::-1]), compute_gradient(trainer, batch)) <= 1e-5


def test_sequences_without_advantage_are_measured_and_have_no_gradient(folder):
    advantages = [1.0, -1.0] + [0.0] * 8
    batch = make_batch(folder, advantages=advantages)
    trainer = TorchTrainer(folder, settings=trainer_settings(**SMALL, reduction="constant_mean", loss_scale_factor=10))

    both, alone = compute_gradient(trainer, batch), compute_gradient(trainer, batch[:2])

    assert compute_distance({name: 5 * value for name, value in both.items()}, alone) <= 1e-5
    tokens = sum(sequence.loss_mask.sum() for sequence in batch)
    assert trainer.train(batch, version=3, progress=0.0)["tokens"] == tokens


def test_on_policy_ratios_are_one_and_log_probabilities_agree(folder):
    metrics = TorchTrainer(folder).train(make_batch(folder), version=3, progress=0.0)

    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["logprob_difference_max"] < 1e-4
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert 0.0 < metrics["entropy"] <= math.log(VOCABULARY)
    assert metrics["grad_norm"] > 0.0


def test_the_temperature_of_the_sampler_is_that_of_the_ratio(folder):
    batch = make_batch(folder, temperature=0.7)

    assert TorchTrainer(folder).train(batch, version=3, progress=0.0)["logprob_difference_max"] < 1e-4


def test_differences_to_the_sampler_are_measured_only_where_the_weights_are_the_same(folder):
    batch = make_batch(folder, off_policy=0.5, version=2)

    metrics = TorchTrainer(folder).train(batch, version=3, progress=0.0)

    assert math.isnan(metrics["logprob_difference_max"])
    assert metrics["ratio_max"] > 1.1
    assert metrics["clip_fraction"] > 0.0
    assert metrics["kl"] > 0.01


def test_training_raises_the_likelihood_of_what_was_better(folder):
    batch = make_batch(folder, advantages=[1.0, -1.0] * 5)
    trainer = TorchTrainer(folder, settings=trainer_settings(warmup_steps=0))
    first = trainer.train(batch, version=3, progress=0.0)

    second = trainer.train(batch, version=4, progress=0.0)

    assert second["loss"] < first["loss"] - 0.01


def test_a_restored_trainer_goes_on_bit_by_bit(folder, tmp_path):
    batches = [make_batch(folder, seed=seed, off_policy=0.1) for seed in (1, 2, 3)]
    straight = TorchTrainer(folder)
    for step in range(2):
        straight.train(batches[step], version=step, progress=step / 10)
    store(straight, tmp_path / "state")
    kept = weights(straight, tmp_path)
    straight.train(batches[2], version=2, progress=0.2)

    resumed = TorchTrainer(folder)
    resumed.train(batches[2], version=0, progress=0.9)  # whatever it did before is forgotten
    resumed.restore(tmp_path / "state")
    assert weights(resumed, tmp_path, "again.safetensors") == kept
    resumed.train(batches[2], version=2, progress=0.2)

    assert weights(resumed, tmp_path, "b.safetensors") == weights(straight, tmp_path, "a.safetensors") != kept


def test_weights_of_another_model_are_refused(folder, tmp_path):
    trainer = TorchTrainer(folder)
    for kind in ("llama", "gpt2"):
        other = TorchTrainer(make_model(tmp_path / kind, kind))
        with pytest.raises(UserError, match="does not fit"):
            trainer.restore(store(other, tmp_path / f"state-{kind}"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no state of this trainer"):
        trainer.restore(tmp_path / "empty")


def test_training_goes_on_while_a_checkpoint_is_written(folder, tmp_path):
    """What was taken does not change with the weights."""
    batch = make_batch(folder)
    trainer, resumed = TorchTrainer(folder), TorchTrainer(folder)
    trainer.train(batch, version=0, progress=0.0)
    kept = weights(trainer, tmp_path)
    (tmp_path / "state").mkdir()
    finish = trainer.start_checkpoint(tmp_path / "state")
    for _ in range(3):
        trainer.train(batch, version=0, progress=0.0)
    finish()

    resumed.restore(tmp_path / "state")

    assert weights(resumed, tmp_path, "again.safetensors") == kept


def test_a_saved_model_loads_and_brings_what_lay_beside_it(folder, tmp_path):
    trainer = TorchTrainer(folder)
    trainer.train(make_batch(folder), version=0, progress=0.0)
    trainer.save_model(tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    own = trainer._model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"kept": true}'
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_the_learning_rate_warms_up_and_decays_with_progress(folder):
    settings = trainer_settings(learning_rate=1e-3, min_lr_ratio=0.1, warmup_steps=2)
    trainer = TorchTrainer(folder, settings=settings)
    batch = make_batch(folder, count=2)

    rates = [trainer.train(batch, version=0, progress=progress)["learning_rate"] for progress in (0.0, 0.0, 0.5, 1.0)]

    assert rates == pytest.approx([0.5e-3, 1e-3, 0.55e-3, 0.1e-3])


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(folder, tmp_path):
    trainer = TorchTrainer(folder)
    before = weights(trainer, tmp_path)
    batch = make_batch(folder, count=2, advantages=[3e38, 1.0])  # finite, as what comes in has to be

    metrics = trainer.train(batch, version=0, progress=0.0)

    assert metrics["skipped_updates"] == 1.0
    assert weights(trainer, tmp_path) == before


@pytest.mark.parametrize(
    "choice",
    [
        {"objective": "gspo", "reduction": "sequence_mean", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        {"objective": "cispo"},
        {"dual_clip": 3.0, "reduction": "constant_mean"},
        {"rollout_correction": "tis", "minibatches": 3, "epochs": 2},
        {"rollout_correction": "tis_sequence"},
        {"rollout_correction": "icepop"},
        {"kl_coefficient": 0.1, "kl_estimator": "k2"},
    ],
)
def test_every_algorithm_trains_with_finite_metrics(folder, choice, tmp_path):
    batch = make_batch(folder, off_policy=0.2)
    trainer = TorchTrainer(folder, settings=trainer_settings(**choice))
    before = weights(trainer, tmp_path)

    metrics = trainer.train(batch, version=3, progress=0.0)

    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["tokens"] == sum(sequence.loss_mask.sum() for sequence in batch)
    assert weights(trainer, tmp_path) != before


def test_corrected_ratios_are_taken_to_the_trainer_before_the_first_of_several_updates(folder):
    batch = make_batch(folder, off_policy=0.5)
    one = TorchTrainer(folder, settings=trainer_settings(rollout_correction="tis"))
    two = TorchTrainer(folder, settings=trainer_settings(rollout_correction="tis", epochs=2, warmup_steps=0))

    assert one.train(batch, version=3, progress=0.0)["ratio_max"] == 1.0
    assert two.train(batch, version=3, progress=0.0)["ratio_max"] > 1.0 + 1e-4


@pytest.mark.parametrize("choice", [{"objective": "ppo"}, {"reduction": "mean"}, {"epochs": 0}, {"dtype": "int8"}])
def test_wrong_settings_are_refused_by_name(folder, choice):
    with pytest.raises(UserError, match=next(iter(choice))):
        TorchTrainer(folder, settings=trainer_settings(**choice))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="contains no model"):
        TorchTrainer(tmp_path)


def test_the_shared_prefix_leaves_the_token_before_the_first_sampled_one():
    ids = [np.arange(40, dtype=np.int32)] * 2
    mask = np.arange(40) >= 30

    assert find_shared_prefix(ids, [mask, mask]) == 29
    assert find_shared_prefix(ids[:1], [mask]) == 0
    assert find_shared_prefix([ids[0], ids[0] + 1], [mask, mask]) == 0
    assert find_shared_prefix([ids[0], np.where(np.arange(40) == 20, 0, ids[0])], [mask, mask]) == 20


def test_micro_batches_hold_every_sampled_token_once_in_the_order_of_its_sequence():
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 99, length).astype(np.int32) for length in (30, 25, 40, 33, 28)]
    masks = [np.arange(len(sequence)) >= 22 for sequence in ids]

    found = {}
    for batch in split_micro_batches(ids, masks, prefix=20, size=2):
        rows = batch.to_rows(batch.targets)
        for row, index in enumerate(batch.indices):
            found[index] = rows[row, : masks[index].sum()].tolist()

    assert found == {index: sequence[22:].tolist() for index, sequence in enumerate(ids)}
