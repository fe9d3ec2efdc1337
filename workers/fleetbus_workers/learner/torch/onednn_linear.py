"""Linear layers through oneDNN where torch multiplies float32 matrices at half the speed of the processor.

On x86 torch gives them to MKL, which uses AVX-512 on Intel's processors alone; on others oneDNN, which comes with torch as
well, is 2.3 times as fast for many rows (`docs/decisions/0159-linear-layers-through-onednn.md`). Results differ in rounding
only.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

MIN_ROWS = 64
"""Rows from which on a product is faster here; below, the call costs more than it saves."""


@functools.cache
def is_faster() -> bool:
    """True on AMD's processors with AVX-512 if this torch has the operator. A rule and no trial: a learner that resumes has to
    compute as the one before."""
    try:
        vendor = "AuthenticAMD" in Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return False
    return vendor and torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def replace_linear(model: nn.Module) -> None:
    """Let the linear layers of a float32 model on the CPU compute through oneDNN; parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """`torch.nn.Linear`; small inputs, other types and autocast go its way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        fits = input.shape[-1:] == (self.in_features,) and input.numel() >= MIN_ROWS * self.in_features > 0
        if not fits or {input.dtype, self.weight.dtype} != {torch.float32} or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        found: torch.Tensor = _Product.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias


class _Product(torch.autograd.Function):
    """``input @ weight.T`` for ``input`` [..., K] and ``weight`` [N, K]."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        needs_input, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        return _multiply(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad
        to_input = _multiply(gradient, weight.t()) if needs_input else None
        to_weight = _multiply(gradient.flatten(0, -2).t(), input.flatten(0, -2).t()) if needs_weight else None
        return to_input, to_weight


def _multiply(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return found
