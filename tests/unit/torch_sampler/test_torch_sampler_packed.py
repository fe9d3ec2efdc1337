"""Packed matrices multiply as they did before they were packed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus_workers.inference.torch import fused_decoder
from fleetbus_workers.inference.torch.fused_decoder import FusedRunner
from fleetbus_workers.inference.torch.packed import can_pack, multiply, pack


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_packed_matrix_gives_the_product_of_the_plain_one(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(96, 160, generator=generator).to(torch.bfloat16)
    left = torch.randn(rows, 96, generator=generator)
    with torch.inference_mode():
        packed = pack(matrix)
        found = multiply(left, packed)
    assert packed.is_mkldnn == can_pack()
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), left.to(torch.bfloat16).float() @ matrix.float(), rtol=0.01, atol=0.1)


def test_a_matrix_of_float32_stays_as_it_is() -> None:
    matrix = torch.ones(2, 3)
    assert pack(matrix) is matrix
    assert torch.equal(multiply(torch.ones(1, 2), matrix), torch.full((1, 3), 2.0))


@pytest.mark.parametrize("shape", [(96, 160), (5, 7)])
def test_a_matrix_of_outputs_first_is_packed_like_a_contiguous_one(shape: tuple[int, int]) -> None:
    """Matrices are outputs first in a file, and oneDNN takes them so: to turn them there and back takes time and memory."""
    matrix = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(0)).t()
    left = torch.randn(4, shape[0], generator=torch.Generator().manual_seed(1))
    assert pack(matrix).is_contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        turned = matrix.to(dtype)
        assert torch.equal(multiply(left, pack(turned)), multiply(left, pack(turned.contiguous())))


def test_a_version_in_bfloat16_is_prepared_with_one_matrix_in_float32_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a vocabulary of 152,000 is half a gigabyte in float32."""
    fold = fused_decoder._fold_norm
    folded: list[weakref.ref[torch.Tensor]] = []

    def note_fold(*matrices: torch.Tensor) -> torch.Tensor:
        assert not [each for each in folded if each() is not None]
        found: Any = fold(*matrices)
        folded.append(weakref.ref(found))
        return found

    monkeypatch.setattr(fused_decoder, "_fold_norm", note_fold)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    FusedRunner(model, slots=1, max_model_len=8)
    assert len(folded) == 1 + 3 * model.config.num_hidden_layers
