"""Matrices in the order in which oneDNN multiplies them, so that it does not reorder them in every step of a few rows.

On two cores of an AMD EPYC with avx512_bf16 a product of 32 rows in bfloat16 takes .6 to .7 of the time, of one row .4 to .7
(`docs/decisions/0267-the-cost-of-a-step-of-few-rows.md`).
"""

from __future__ import annotations

import functools

import torch

ROWS = 32
"""Rows that the order is chosen for; any number may be multiplied."""


@functools.cache
def can_pack() -> bool:
    """True if this torch has oneDNN's operators and the processor multiplies in bfloat16."""
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and bool(operators._is_mkldnn_bf16_supported())


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` [inputs, outputs], packed where it is of bfloat16 on the CPU, else contiguous."""
    if matrix.device.type != "cpu" or matrix.dtype != torch.bfloat16 or not can_pack():
        return matrix.contiguous()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), ROWS)
    return packed


def multiply(left: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``left`` [rows, inputs] times a matrix that `pack` returned, in the matrix's type: [rows, outputs]."""
    left = left.to(matrix.dtype)
    if not matrix.is_mkldnn:
        return left.mm(matrix)
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, matrix, None, "none", [], "")
    return found
