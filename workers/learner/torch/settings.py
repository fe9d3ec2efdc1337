"""What can be chosen about torch training: plain data, checked when a trainer is made."""

from __future__ import annotations

import msgspec

from fleetbus.core.corrections import CORRECTIONS, KL_ESTIMATORS
from fleetbus.core.objectives import OBJECTIVES
from fleetbus.errors import UserError

REDUCTIONS = ("token_mean", "sequence_mean", "constant_mean")


class TorchTrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are those of the starter policy; a real model wants a ``learning_rate`` of about 1e-6.

    The rate rises over ``warmup_updates`` optimizer steps, because Adam's first steps have the full rate in every weight
    however small its gradient, and falls linearly with progress to ``decayed_to`` of itself. ``clip_low`` and ``clip_high``
    are offsets from 1. A batch is split into ``minibatches`` of one optimizer step each, ``epochs`` times over.
    ``correction`` weighs the difference between sampler and trainer with ``correction_low`` and ``correction_high``; while
    it is "none", ratios are taken to the sampler's log-probabilities, else to the trainer's own before the update.
    ``kl_coefficient`` pulls towards the sampler's policy. ``constant_length`` is the divisor of "constant_mean".
    ``threads`` 0 leaves torch's own choice.
    """

    learning_rate: float = 3e-4
    decayed_to: float = 0.2
    warmup_updates: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_norm: float = 1.0
    objective: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    reduction: str = "token_mean"
    constant_length: int = 1024
    correction: str = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    minibatches: int = 1
    epochs: int = 1
    micro_batch_size: int = 16
    share_prefix: bool = True
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0

    def check(self) -> None:
        """Raise `UserError` naming the first setting that is wrong."""
        for name, allowed in (
            ("objective", tuple(OBJECTIVES)),
            ("reduction", REDUCTIONS),
            ("correction", tuple(CORRECTIONS)),
            ("kl_estimator", tuple(KL_ESTIMATORS)),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"trainer setting {name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name in ("minibatches", "epochs", "micro_batch_size", "constant_length"):
            if getattr(self, name) < 1:
                raise UserError(f"trainer setting {name} is {getattr(self, name)}: it must be at least 1")
