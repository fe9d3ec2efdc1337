"""The settings of the torch trainer: the configuration's tables, and what no user chooses."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus.config.check import check_training
from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, TrainerSettings
from fleetbus.core.algorithms.losses import LossPlan
from fleetbus.core.algorithms.objectives import Clip
from fleetbus.errors import UserError


class TorchTrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are those of the starter policy; a real model wants a ``learning_rate`` of about 1e-6.

    The rate rises over ``warmup_steps`` optimizer steps, because Adam's first steps have the full rate in every weight
    however small its gradient, and falls with progress to ``min_lr_ratio`` of itself as ``lr_scheduler_type`` says.
    ``clip_ratio_low`` and ``clip_ratio_high`` are offsets from 1. A batch is split into ``minibatches`` of one optimizer step
    each, ``epochs`` times over. The KL pulls to the sampler's policy, (``kl_reference`` "start") to the model of the
    folder, or ("moving") to one that begins there and follows.

    A forward pass takes at most ``micro_batch_size`` sequences and, with a ``token_budget``, so many tokens; ``packing`` puts
    sequences into one row up to the budget. Sequences over ``max_tokens`` are cut at their end. ``precision`` "bfloat16"
    computes in that type while weights and optimizer stay in ``dtype``. Weights are saved in ``published_dtype``; where that is
    less than ``dtype``, the state of a checkpoint holds them too, as they are. ``lora_rank`` above 0 trains adapters of
    ``lora_target_modules`` only, scaled by ``lora_alpha / lora_rank``. ``images``: the folder holds a model that sees, and is
    shown the images of its sequences.
    """

    learner: LearnerSettings = LearnerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    images: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    share_prefix: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def loss(self) -> LossPlan:
        """The part that `fleetbus.core` computes."""
        learner = self.learner
        clip = Clip(low=learner.clip_ratio_low, high=learner.clip_ratio_high, dual=learner.dual_clip or None)
        return LossPlan(**msgspec.structs.asdict(self.algorithm), clip=clip)

    @property
    def needs_reference(self) -> bool:
        """True if another model has to be asked too: that of the run's start, or one that follows."""
        return self.algorithm.pulls_to_a_model

    @property
    def needs_critic(self) -> bool:
        """True if advantages are those of a critic."""
        return self.learner.advantage_estimator == "gae"

    def check(self) -> None:
        """Raise `UserError` naming the first setting that is wrong."""
        try:
            msgspec.convert(msgspec.to_builtins(self), TorchTrainerSettings)
        except msgspec.ValidationError as error:
            raise UserError(f"trainer setting: {error}") from error
        check_training(self.algorithm, self.trainer)
