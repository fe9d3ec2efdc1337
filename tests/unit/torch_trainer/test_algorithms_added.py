"""Entropy bonus, REINFORCE++, distillation and functions of the user's, against closed forms and torch's own gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.config.check import check_configuration
from fleetbus.config.settings import AlgorithmSettings, Configuration, LearnerSettings
from fleetbus.core.algorithms.advantages import ADVANTAGES, normalise_tokens
from fleetbus.core.algorithms.corrections import kl_k1
from fleetbus.errors import UserError
from fleetbus_workers.learner.batches import CreditPlan
from fleetbus_workers.learner.hooks import check_hooks, load_advantage, load_loss
from fleetbus_workers.learner.torch.advantages import add_teacher, apply_kl_penalty, normalise
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import compute_distance, compute_gradient, compute_logprobs, make_model, make_sequence
from tests.support.trainer_settings import trainer_settings

PROMPT, COUNT = 12, 5
NOTHING_CLIPPED = {
    "clip_ratio_low": 0.99,
    "clip_ratio_high": 99.0,
    "dual_clip": 0.0,
    "max_grad_norm": 1e9,
    "micro_batch_size": 2,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture with the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher"), "llama", spread=0.2)


@pytest.fixture(scope="module")
def batch(folder: Path) -> list[Any]:
    """Sampled by the model itself, as far as log-probabilities tell."""
    draw, model = np.random.default_rng(0), AutoModelForCausalLM.from_pretrained(folder).eval()
    made = []
    for index in range(COUNT):
        ids = draw.integers(3, 60, PROMPT + 4 + index).astype(np.int32)
        logprobs = np.concatenate([[0.0], compute_logprobs(model, ids)])
        made.append(make_sequence(index, ids, np.arange(len(ids)) >= PROMPT, logprobs=logprobs, advantage=draw.normal()))
    return made


def make_trainer(folder: Path, **settings: Any) -> TorchTrainer:
    return TorchTrainer(folder, settings=trainer_settings(**{**NOTHING_CLIPPED, **settings}))


def plain_gradient(folder: Path, batch: list[Any], compute: Any) -> dict[str, torch.Tensor]:
    """Of ``compute(logits [T, V], sequence)``, summed over sequences and divided by their tokens, by torch alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
    total = torch.zeros(())
    for sequence in batch:
        logits = model(torch.from_numpy(sequence.ids[None].astype(np.int64))).logits[0, :-1]
        total = total + compute(logits[torch.from_numpy(sequence.loss_mask[1:])], sequence) / tokens
    total.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def surrogate(logits: torch.Tensor, sequence: Any) -> torch.Tensor:
    """``-A pi / mu`` where pi is mu: the gradient of REINFORCE."""
    ids = torch.from_numpy(sequence.ids[sequence.loss_mask].astype(np.int64))
    found = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]
    before = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
    return -(torch.exp(found - before) * torch.from_numpy(sequence.advantages[sequence.loss_mask])).sum()


# Entropy bonus


@pytest.mark.parametrize("silent", [False, True], ids=["with advantages", "without"])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy(folder: Path, batch: list[Any], silent: bool) -> None:
    if silent:
        batch = [msgspec.structs.replace(each, advantages=np.zeros_like(each.advantages)) for each in batch]

    def compute(logits: torch.Tensor, sequence: Any) -> torch.Tensor:
        everywhere = torch.log_softmax(logits, -1)
        return surrogate(logits, sequence) + 0.3 * (everywhere.exp() * everywhere).sum()

    found = compute_gradient(make_trainer(folder, entropy_coefficient=0.3), batch)

    assert compute_distance(found, plain_gradient(folder, batch, compute)) < 1e-4


# REINFORCE++


def test_normalised_tokens_have_mean_0_and_deviation_1_over_the_batch() -> None:
    advantages, mask = np.array([[1.0, 2.0, 9.0], [4.0, 5.0, 0.0]]), np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    found = normalise_tokens(advantages, mask)
    chosen = np.array([1.0, 2.0, 4.0, 5.0])
    np.testing.assert_allclose(found[mask > 0], (chosen - chosen.mean()) / chosen.std(), rtol=1e-6)
    assert not found[mask == 0].any()
    assert not normalise_tokens(np.full((1, 3), 7.0), np.ones((1, 3))).any(), "equal rewards teach nothing"


def test_reinforce_plus_plus_takes_the_kl_out_of_rewards_and_normalises_over_all_tokens(folder: Path, batch: list[Any]) -> None:
    """By hand: A_t = R - beta * the sum of KL from t on; then mean and deviation over the batch's tokens."""
    rewards, draw, beta = [1.0, 0.0, 1.0, 0.5, 0.0], np.random.default_rng(1), 0.1
    np.testing.assert_array_equal(ADVANTAGES["reinforce_plus_plus"](np.array(rewards), np.zeros(COUNT)), rewards)
    given = [
        msgspec.structs.replace(
            each,
            advantages=np.where(each.loss_mask, reward, 0).astype(np.float32),
            logprobs=np.where(each.loss_mask, each.logprobs + 0.1 * draw.normal(size=len(each.ids)), 0).astype(np.float32),
        )
        for each, reward in zip(batch, rewards, strict=True)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    policy = [compute_logprobs(model, each.ids)[each.loss_mask[1:]] for each in batch]
    raw = []
    for each, reward, own in zip(given, rewards, policy, strict=True):
        divergence = kl_k1(own, each.logprobs[each.loss_mask])
        raw.append(reward - beta * np.cumsum(divergence[::-1])[::-1])
    flat = np.concatenate(raw)
    expected = (flat - flat.mean()) / flat.std()

    algorithm = AlgorithmSettings(kl_coefficient=beta, kl_estimator="k1", kl_place="reward")
    shaped = normalise(apply_kl_penalty(given, algorithm, [torch.from_numpy(own) for own in policy], None))
    found = compute_gradient(
        make_trainer(
            folder, advantage_estimator="reinforce_plus_plus", kl_coefficient=beta, kl_estimator="k1", kl_place="reward"
        ),
        given,
    )

    np.testing.assert_allclose(np.concatenate([each.advantages[each.loss_mask] for each in shaped]), expected, atol=1e-4)
    assert compute_distance(found, plain_gradient(folder, shaped, surrogate)) < 1e-4


# Distillation


def test_distillation_follows_the_reverse_kl_to_a_teacher_of_another_architecture(
    folder: Path, teacher: Path, batch: list[Any]
) -> None:
    its = AutoModelForCausalLM.from_pretrained(teacher).eval()
    silent = [msgspec.structs.replace(each, advantages=np.zeros_like(each.advantages)) for each in batch]
    gaps = [compute_logprobs(its, each.ids)[each.loss_mask[1:]] - each.logprobs[each.loss_mask] for each in batch]
    expected = []
    for each, gap in zip(silent, gaps, strict=True):
        advantages = np.zeros_like(each.advantages)
        advantages[each.loss_mask] = 0.5 * gap
        expected.append(msgspec.structs.replace(each, advantages=advantages))

    trainer = make_trainer(folder, teacher=str(teacher), teacher_coefficient=0.5)
    found = compute_gradient(trainer, silent)
    metrics = trainer.train(silent, version=3, progress=0.0)

    assert compute_distance(found, plain_gradient(folder, expected, surrogate)) < 1e-4
    assert metrics["teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-4)


@pytest.mark.integration
def test_distillation_brings_the_policy_to_the_teacher(folder: Path, teacher: Path) -> None:
    """On one prompt, over all of the vocabulary: the policy samples anew before every step."""
    trainer = make_trainer(folder, teacher=str(teacher), learning_rate=3e-3, warmup_steps=1, micro_batch_size=64)
    prompt = np.arange(3, 3 + PROMPT, dtype=np.int32)
    draw, told = np.random.default_rng(0), []
    for _ in range(30):
        with torch.no_grad():
            logits = trainer._model(torch.from_numpy(prompt[None].astype(np.int64))).logits[0, -1]
        everywhere = torch.log_softmax(logits.double(), -1).numpy()
        sampled = draw.choice(len(everywhere), 64, p=np.exp(everywhere) / np.exp(everywhere).sum())
        made = [
            make_sequence(
                index,
                np.append(prompt, token).astype(np.int32),
                np.arange(PROMPT + 1) >= PROMPT,
                logprobs=np.full(PROMPT + 1, everywhere[token]),
                advantage=0.0,
            )
            for index, token in enumerate(sampled)
        ]
        told.append(trainer.train(made, version=3, progress=0.0)["teacher_kl"])
    assert np.mean(told[-5:]) < 0.5 * np.mean(told[:5])


def test_a_token_that_the_teacher_rules_out_does_not_make_the_step_infinite(batch: list[Any]) -> None:
    ruled_out = [torch.full((int(each.loss_mask.sum()),), -float("inf")) for each in batch]
    shaped, divergence = add_teacher(batch, 1.0, ruled_out)
    assert all(np.isfinite(each.advantages).all() for each in shaped) and divergence == pytest.approx(20.0)


def test_a_teacher_with_fewer_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it has 32 tokens, the policy 64"):
        make_trainer(folder, teacher=str(tmp_path))


# Functions of the user's

HOOKS = """
import torch
def pg(logprobs, old_logprobs, advantages, mask, clip): return -torch.exp(logprobs - old_logprobs) * advantages
def scalar(logprobs, old_logprobs, advantages, mask, clip): return (logprobs * advantages).sum()
def constant(logprobs, old_logprobs, advantages, mask, clip): return logprobs.detach() * advantages
def flat(logprobs, old_logprobs, advantages, mask, clip): return 0.0 * logprobs
def infinite(logprobs, old_logprobs, advantages, mask, clip): return torch.log(logprobs)
def short(logprobs): return logprobs
def centred(rewards, groups, *, minimum): return rewards - rewards.mean()
def divided(rewards, groups, *, minimum): return (rewards - rewards.mean()) / rewards.std()
def one(rewards, groups, *, minimum): return rewards.mean()
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"hooks_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_loss.cache_clear()
    load_advantage.cache_clear()
    return name


def test_an_own_loss_takes_the_place_of_the_objective(folder: Path, batch: list[Any], hooks: str) -> None:
    found = compute_gradient(make_trainer(folder, loss=f"{hooks}:pg"), batch)
    assert compute_distance(found, plain_gradient(folder, batch, surrogate)) < 1e-4


def test_an_own_estimator_takes_the_place_of_the_configured_one(hooks: str) -> None:
    plan = CreditPlan.from_configuration(Configuration(algorithm=AlgorithmSettings(advantage=f"{hooks}:centred")))
    assert load_advantage(plan.advantage)(np.array([0.0, 1.0]), np.zeros(2), minimum=2).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("setting", "name", "reason"),
    [
        ("loss", "scalar", "shape of logprobs, 3 x 5, not Tensor of shape"),
        ("loss", "constant", "carry no gradient"),
        ("loss", "flat", "is 0 everywhere"),
        ("loss", "infinite", "are not finite"),
        ("loss", "short", "fails on a few numbers: TypeError"),
        ("loss", "missing", "has no 'missing'"),
        ("advantage", "divided", "are not finite"),
        ("advantage", "one", "one number per episode"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_in_one_line_before_training(
    hooks: str, setting: str, name: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refused, np.errstate(all="ignore"):
        check_hooks(msgspec.convert({setting: f"{hooks}:{name}"}, AlgorithmSettings))
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"algorithm.{setting} = {hooks}:{name}")


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="cannot import no_such_module"):
        check_hooks(AlgorithmSettings(loss="no_such_module:f"))
    with pytest.raises(UserError, match="must name a module and a name"):
        check_hooks(AlgorithmSettings(advantage="nothing"))


@pytest.mark.parametrize("algorithm", [{"entropy_coefficient": 0.1}, {"teacher": "t"}, {"loss": "m:f"}])
def test_what_the_torch_trainer_alone_computes_is_refused_for_another(algorithm: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"needs learner\.trainer = torch"):
        check_configuration(Configuration(learner=LearnerSettings(trainer="tinker"), algorithm=AlgorithmSettings(**algorithm)))


def test_advantages_of_nothing_are_refused_without_a_teacher() -> None:
    learner = LearnerSettings(advantage_estimator="none")
    with pytest.raises(UserError, match="nothing would be learned"):
        check_configuration(Configuration(learner=learner))
    check_configuration(Configuration(learner=learner, algorithm=AlgorithmSettings(teacher="t")))
