"""Packed matrices multiply as they did before they were packed."""

from __future__ import annotations

import pytest
import torch

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
