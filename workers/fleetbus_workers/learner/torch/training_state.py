"""What a checkpoint keeps of a model in training: its weights and its optimizer's numbers, by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Named = Iterable[tuple[str, torch.Tensor]]


def collect_state(
    tensors: Named, parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Every one of ``tensors``, and the optimizer's of ``parameters`` that are trained, by name: the same for any number of
    processes. Before the first update the optimizer's are zeros."""
    state = {f"{prefix}weights.{name}": tensor.detach() for name, tensor in tensors}
    for name, parameter in parameters:
        if parameter.requires_grad:
            known = optimizer.state.get(parameter) or _build_moments(parameter)
            state |= {f"{prefix}optimizer.{key}.{name}": value.detach() for key, value in known.items()}
    return state


def prepare_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW numbers to read into, where it has none yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _build_moments(parameter)


def _build_moments(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}
