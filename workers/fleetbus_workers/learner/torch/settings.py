"""What can be chosen about torch training: plain data, checked when a trainer is made."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus.core.corrections import CORRECTIONS, KL_ESTIMATORS
from fleetbus.core.losses import REDUCTIONS, LossPlan
from fleetbus.core.objectives import OBJECTIVES
from fleetbus.errors import UserError

SCHEDULES = ("linear", "cosine", "constant")


class TorchTrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are those of the starter policy; a real model wants a ``learning_rate`` of about 1e-6.

    The rate rises over ``warmup_steps`` optimizer steps, because Adam's first steps have the full rate in every weight
    however small its gradient, and falls with progress to ``min_lr_ratio`` of itself as ``lr_scheduler_type`` says.
    ``clip_ratio_low`` and
    ``clip_ratio_high`` are offsets from 1. A batch is split into ``minibatches`` of one optimizer step each, ``epochs`` times
    over.
    Objective, correction, KL and reduction are those of `fleetbus.core.losses.LossPlan`; the KL pulls to the sampler's policy,
    or (``kl_reference`` "start") to the model of the folder. ``threads`` 0 leaves torch's own choice.

    A forward pass takes at most ``micro_batch_size`` sequences and, with a ``token_budget``, so many tokens; ``packing`` puts
    sequences into one row up to the budget. Sequences over ``max_tokens`` are cut at their end. ``precision`` "bfloat16"
    computes in that type while weights and optimizer stay in ``dtype``. Weights are saved in ``published_dtype``; where that is
    less than ``dtype``, the state of a checkpoint holds them too, as they are. ``lora_rank`` above 0 trains adapters of
    ``lora_target_modules`` only, scaled by ``lora_alpha / lora_rank``. ``images``: the folder holds a model that sees, and is
    shown
    the images of its sequences.
    """

    learning_rate: float = 3e-4
    min_lr_ratio: float = 0.2
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 0.1
    objective: str = "ppo_clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    dual_clip: float | None = 3.0
    reduction: str = "token_mean"
    loss_scale_factor: int = 1024
    rollout_correction: str = "none"
    rollout_correction_low: float = 0.5
    rollout_correction_high: float = 2.0
    old_policy: Literal["auto", "sampler", "trainer"] = "auto"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    kl_place: Literal["loss", "reward"] = "loss"
    kl_reference: Literal["sampler", "start"] = "sampler"
    minibatches: int = 1
    epochs: int = 1
    micro_batch_size: int = 16
    token_budget: int = 0
    packing: bool = False
    max_tokens: int = 0
    share_prefix: bool = True
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "float32"
    published_dtype: str = "float32"
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_target_modules: str = "all-linear"
    threads: int = 0
    images: bool = False

    @property
    def loss(self) -> LossPlan:
        """The part that `fleetbus.core` computes."""
        return msgspec.convert({name: getattr(self, name) for name in LossPlan.__struct_fields__}, LossPlan)

    @property
    def needs_reference(self) -> bool:
        """True if the model of the run's start has to be asked too."""
        return bool(self.kl_coefficient) and self.kl_reference == "start"

    def check(self) -> None:
        """Raise `UserError` naming the first setting that is wrong."""
        for name, allowed in (
            ("objective", tuple(OBJECTIVES)),
            ("reduction", REDUCTIONS),
            ("rollout_correction", tuple(CORRECTIONS)),
            ("kl_estimator", tuple(KL_ESTIMATORS)),
            ("lr_scheduler_type", SCHEDULES),
            ("dtype", ("float32", "bfloat16")),
            ("precision", ("float32", "bfloat16")),
            ("published_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"trainer setting {name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name in ("minibatches", "epochs", "micro_batch_size", "loss_scale_factor"):
            if getattr(self, name) < 1:
                raise UserError(f"trainer setting {name} is {getattr(self, name)}: it must be at least 1")
        if self.packing and not self.token_budget:
            raise UserError("trainer setting packing needs a token_budget: the tokens of one packed row")
        if self.rollout_correction == "geometric" and self.rollout_correction_low > 1.0:
            raise UserError(f"rollout_correction_low is {self.rollout_correction_low}: a geometric mask has to let 1 through")
