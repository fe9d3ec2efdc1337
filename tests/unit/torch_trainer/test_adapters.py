"""LoRA adapters of the torch trainer, with the real peft."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.errors import UserError
from fleetbus_workers.weights.file import read_weights
from tests.support.checkpoints import store
from tests.support.sampled_turns import make_batch, trainer
from tests.support.trainable_model import CONFIGS, VOCABULARY, make_model


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"lora_rank": 2, "lora_target_modules": "q_proj,embed_tokens"}])
def test_a_trainer_says_how_many_tokens_its_model_can_embed(tmp_path: Path, options: dict[str, Any]) -> None:
    if options:
        pytest.importorskip("peft")
    assert trainer(make_model(tmp_path, "llama"), **options).vocabulary == VOCABULARY


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_leave_the_model_alone_and_are_published_merged(peft: Any, tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path / "model", kind)
    adapted = trainer(folder, lora_rank=4, learning_rate=1e-2, warmup_steps=0)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    manifest = adapted.save_weights(tmp_path / "v0")
    whole = read_weights(tmp_path / "plain", trainer(folder).save_weights(tmp_path / "plain"))
    assert {entry.name for entry in manifest} == set(whole)
    for name, tensor in read_weights(tmp_path / "v0", manifest).items():
        assert torch.equal(tensor, whole[name])
    batch = make_batch(folder, off_policy=0.0)
    adapted.train(batch, version=0, progress=0.0)
    adapted.train(batch, version=0, progress=0.0)
    adapted.save_weights(tmp_path / "v1")
    adapted.save_model(tmp_path / "out")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted._model(ids).logits, atol=1e-4, rtol=1e-4)
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and not any("norm" in name or "embed" in name or "wte" in name for name in changed)


def test_adapters_go_on_bit_by_bit_from_a_checkpoint(peft: Any, folder: Path, tmp_path: Path) -> None:
    settings = {"lora_rank": 2, "learning_rate": 1e-2, "warmup_steps": 0}
    batch = make_batch(folder)
    straight = trainer(folder, **settings)
    straight.train(batch, version=0, progress=0.0)
    straight.save_weights(tmp_path / "weights")
    store(straight, tmp_path / "state")
    straight.train(batch, version=1, progress=0.0)

    resumed = trainer(folder, **settings)
    resumed.restore(tmp_path / "state")
    resumed.train(batch, version=1, progress=0.0)

    straight.save_weights(tmp_path / "a")
    resumed.save_weights(tmp_path / "b")
    assert filecmp.cmp(tmp_path / "a", tmp_path / "b", shallow=False)
    with pytest.raises(UserError, match=r"lora_A.* has shape \(2, \d+\) there, and \(3, \d+\) here"):
        trainer(folder, **{**settings, "lora_rank": 3}).restore(tmp_path / "state")


def test_the_kl_to_the_start_asks_the_model_without_its_adapters(peft: Any, folder: Path) -> None:
    batch = make_batch(folder, off_policy=0.0)
    adapted = trainer(folder, lora_rank=2, learning_rate=1e-2, warmup_steps=0, kl_coefficient=0.1, kl_reference="start")
    plain = adapted._compute_logprobs(batch, adapted._model)
    adapted.train(batch, version=0, progress=0.0)

    reference = adapted._compute_initial_logprobs(batch).reference

    assert reference is not None
    for found, expected in zip(reference, plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(adapted._compute_logprobs(batch, adapted._model)[0], plain[0], atol=1e-4)


def test_targets_that_the_model_lacks_are_refused(peft: Any, folder: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.lora_target_modules = nowhere"):
        trainer(folder, lora_rank=2, lora_target_modules="nowhere")
