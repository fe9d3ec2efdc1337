"""AdamW beside the weights, or with its numbers in the CPU's memory, where it then computes too.

On a GPU two thirds of what training a weight takes beside its gradient are AdamW's two numbers. Offloaded, a step brings a
tensor's gradient and weights to the CPU, updates them there and brings the weights back: 12 bytes over the bus for each weight
of this process, tensor by tensor.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharding import Shards, get_local


def compute_learning_rate(settings: TorchTrainerSettings, progress: float, updates: int) -> float:
    """The rate for ``progress`` in [0, 1) after so many ``updates``."""
    passed = min(max(progress, 0.0), 1.0)
    share = {"linear": 1.0 - passed, "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)), "constant": 1.0}
    decayed = 1.0 - (1.0 - settings.learner.min_lr_ratio) * (1.0 - share[settings.trainer.lr_scheduler_type])
    warmed = min(1.0, (updates + 1) / max(settings.learner.warmup_steps, 1))
    return settings.learner.learning_rate * decayed * warmed


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state lies on the CPU, sharded as its parameters are, wherever those lie."""

    def __init__(self, groups: Any, shards: Shards, **options: Any) -> None:
        super().__init__(groups, **options)
        self._shards = shards

    def build_zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        """The first value of a moment of ``parameter``."""
        return self._shards.build_zeros_on_cpu(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if not (state := self.state[parameter]):
            state |= build_moments(self, parameter)
        own = get_local(parameter)
        weights = own.to("cpu", copy=True)
        adamw(
            [weights],
            [get_local(parameter.grad).to("cpu")],
            [get_local(state["exp_avg"])],
            [get_local(state["exp_avg_sq"])],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        own.copy_(weights)


def build_optimizer(
    groups: Sequence[dict[str, Any]], settings: TorchTrainerSettings, shards: Shards, device: torch.device
) -> torch.optim.AdamW:
    """For the parameters of ``groups``, which lie on ``device``."""
    options: dict[str, Any] = {
        "lr": settings.learner.learning_rate, "betas": settings.betas, "weight_decay": settings.trainer.weight_decay
    }  # fmt: skip
    if settings.trainer.offload_optimizer:
        return OffloadedAdamW(groups, shards, **options)
    # The CPU's fused kernel takes every tensor for a contiguous one.
    is_plain = all(each.is_contiguous() for group in groups for each in group["params"])
    return torch.optim.AdamW(groups, fused=device.type == "cuda" or (device.type == "cpu" and is_plain), **options)


Named = Iterable[tuple[str, torch.Tensor]]


def collect_state(
    tensors: Named, parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint keeps of a model in training: every one of ``tensors``, and the optimizer's of
    ``parameters`` that are trained, by name: the same for any number of processes. Before the first update the optimizer's are
    zeros."""
    state = {f"{prefix}weights.{name}": tensor.detach() for name, tensor in tensors}
    for name, parameter in parameters:
        if parameter.requires_grad:
            known = optimizer.state.get(parameter) or build_moments(optimizer, parameter)
            state |= {f"{prefix}optimizer.{key}.{name}": value.detach() for key, value in known.items()}
    return state


def prepare_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW numbers to read into, where it has none yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = build_moments(optimizer, parameter)


def build_moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's numbers of a parameter before its first update. The fused kernel reads its count of steps where the parameter
    lies, the others read it on the CPU."""
    build = optimizer.build_zeros if isinstance(optimizer, OffloadedAdamW) else torch.zeros_like
    place = parameter.device if optimizer.defaults["fused"] else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=place)
    return {"step": step} | {name: build(parameter) for name in ("exp_avg", "exp_avg_sq")}
