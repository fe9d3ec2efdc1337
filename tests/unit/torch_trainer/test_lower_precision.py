"""Training in bfloat16, as GPUs do it: the head in float32 as the engine has it, and what looks at a model before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fleetbus.errors import UserError
from fleetbus_workers.inference.vllm.engine import EngineSettings, build_engine_arguments
from fleetbus_workers.learner.torch.packed_attention import NAME, attend_by_sequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.sampled_turns import make_batch
from tests.support.trainable_model import CONFIGS, make_model
from tests.support.trainer_settings import trainer_settings


def make_trainer(folder: Path, **settings: Any) -> TorchTrainer:
    return TorchTrainer(folder, settings=trainer_settings(precision="bfloat16", **settings))


def compute_with_head(trainer: TorchTrainer, ids: torch.Tensor, head: torch.dtype) -> torch.Tensor:
    """Log-probabilities of ``ids`` [T] after the first: hidden states in bfloat16, the head in ``head``."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = trainer._model.base_model(input_ids=ids[None]).last_hidden_state[0, :-1]
    with torch.no_grad():
        logits = hidden.to(head) @ trainer._model.get_output_embeddings().weight.to(head).T
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("path", ["plain", "inside", "whole"])
@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_logits_are_computed_in_the_precision_of_the_head_on_every_path(tmp_path: Path, head: str, path: str) -> None:
    """Sharded models compute them inside their forward pass, those with a soft cap at its end."""
    folder = make_model(tmp_path, "llama")
    trainer = make_trainer(folder, head_precision=head, share_prefix=False)
    trainer._head = {"plain": (True, False), "inside": (False, False), "whole": (False, True)}[path]
    (sequence,) = make_batch(folder, count=1)

    (found,) = trainer.compute_logprobs([sequence])

    ids = torch.from_numpy(sequence.ids.astype("int64"))
    wanted = compute_with_head(trainer, ids, getattr(torch, head))[torch.from_numpy(sequence.loss_mask[1:])]
    other = compute_with_head(trainer, ids, torch.bfloat16 if head == "float32" else torch.float32)
    assert (found - wanted).abs().max() < 2e-6
    assert (found - other[torch.from_numpy(sequence.loss_mask[1:])]).abs().max() > 1e-3


def test_a_head_in_float32_has_a_gradient_in_chunks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.learner.torch.token_scores.CHUNK_BYTES", 4 * 64 * 3)
    folder = make_model(tmp_path)
    trainer = make_trainer(folder)
    assert trainer.train(make_batch(folder), version=3, progress=0.0)["grad_norm"] > 0


def test_the_engine_computes_its_head_as_the_trainer_does() -> None:
    settings = EngineSettings(folder=Path("m"), dtype="bfloat16")
    assert build_engine_arguments(settings, has_gpu=True)["hf_overrides"] == {"head_dtype": "float32"}
    given = EngineSettings(folder=Path("m"), dtype="bfloat16", options={"hf_overrides": {"rope_theta": 1e6}})
    assert build_engine_arguments(given, has_gpu=True)["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1e6}
    for plain in (EngineSettings(folder=Path("m"), dtype="bfloat16", head_dtype="model"), EngineSettings(folder=Path("m"))):
        assert "hf_overrides" not in build_engine_arguments(plain, has_gpu=True)


def test_a_model_is_looked_at_in_the_precision_that_it_trains_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention refuses float32; under autocast transformers casts for it."""

    def refuse_float32(module: torch.nn.Module, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return sdpa_attention_forward(module, query, *rest, **options)

    folder = make_model(tmp_path, "llama")
    batch = make_batch(folder)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse_float32)
    trainer = make_trainer(folder, attention="sdpa")
    assert trainer.train(batch, version=3, progress=0.0)["tokens"] > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_can_be_packed_in_bfloat16_though_kernels_round_longer_rows_otherwise(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)

    def round_otherwise(module: torch.nn.Module, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found, weights = attend_by_sequence(module, query, *rest, **options)
        ulp = 2**-8 * (query.shape[2] > 7 and query.dtype == torch.bfloat16)
        return found + ulp * found * torch.randint_like(found, -1, 2), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, round_otherwise)
    trainer = make_trainer(make_model(tmp_path, kind), packing=True, token_budget=200)
    assert trainer._model.config._attn_implementation == NAME


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_whose_packed_sequences_see_each_other_is_refused_in_bfloat16(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend_to_all(module: torch.nn.Module, *tensors: torch.Tensor, **options: Any) -> Any:
        options.pop("position_ids", None)
        return sdpa_attention_forward(module, *tensors[:3], None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, attend_to_all)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend_to_all)
    with pytest.raises(UserError, match="would see each other"):
        make_trainer(make_model(tmp_path, kind), packing=True, token_budget=200)
