"""The critic of PPO: a copy of the model with a value head, which foresees what every sampled token will be rewarded.

Above it is the trainer, which asks it for advantages and lets it learn beside each step of the policy. It has its own weights
and optimizer, so that its errors do not move the policy; checkpoints hold both, published versions only the policy.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from fleetbus.core.algorithms.gae import clip_values, compute_gae, explain_variance, find_turn_ends
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch import model as models
from fleetbus_workers.learner.torch.advantages import normalise
from fleetbus_workers.learner.torch.batches import MicroBatch, split_micro_batches
from fleetbus_workers.learner.torch.forward import supports_logits_to_keep
from fleetbus_workers.learner.torch.optimizer import build_optimizer, collect_state, prepare_moments
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharding import Shards, gather_tensor

STATE = "critic."
"""What its tensors' names in a checkpoint begin with."""


class Critic:
    """``folder`` is the model that it starts from; its head starts at 0. Every process has to make the same calls."""

    def __init__(self, folder: Path, settings: TorchTrainerSettings, device: torch.device, shards: Shards) -> None:
        self._settings = settings
        self._shards = shards
        self._model = models.load_model(folder, settings, device, shards)
        embedding, output = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if output is not None and output.weight is not embedding.weight:
            output.requires_grad_(False)  # no value passes through it
        if settings.trainer.gradient_checkpointing:
            models.enable_gradient_checkpointing(self._model)
        self._head = torch.nn.Linear(embedding.weight.shape[1], 1, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._parts = (
            [parameter for parameter in self._model.parameters() if parameter.requires_grad],
            list(self._head.parameters()),  # no process shards it: clipped and updated apart from what is sharded
        )
        self._optimizer = build_optimizer([{"params": part} for part in self._parts], settings, shards, device)
        self._old: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._losses: list[float] = []

    def estimate(self, batch: Sequence[TrainingSequence]) -> tuple[list[TrainingSequence], dict[str, float]]:
        """The batch, whose advantages are returns, with generalized advantages, normalised over all sampled tokens; and what
        was measured: ``explained_variance``, ``value_mean``, ``return_mean``. It is what `update` learns from."""
        algorithm = self._settings.algorithm
        discount = algorithm.turn_discount if algorithm.credit_assignment == "turn" else 1.0
        found = self._compute_values(batch)
        changed, targets, device = [], [], self._model.device
        for sequence, values in zip(batch, found, strict=True):
            returns = sequence.advantages[sequence.loss_mask]
            advantages, target = compute_gae(
                returns,
                values.numpy(),
                find_turn_ends(sequence.loss_mask, returns),
                discount=discount,
                decay=algorithm.gae_lambda,
            )
            whole = np.zeros_like(sequence.advantages)
            whole[sequence.loss_mask] = advantages
            changed.append(msgspec.structs.replace(sequence, advantages=whole))
            targets.append(target)
        self._old = [values.to(device) for values in found]
        self._targets = [torch.from_numpy(target.astype(np.float32)).to(device) for target in targets]
        self._losses = []
        expected, wanted = np.concatenate([values.numpy() for values in found]), np.concatenate(targets)
        measured = {
            "explained_variance": explain_variance(expected.astype(np.float64), wanted) if len(wanted) else 0.0,
            "value_mean": float(expected.mean()) if len(expected) else 0.0,
            "return_mean": float(wanted.mean()) if len(wanted) else 0.0,
        }
        return normalise(changed), measured

    def update(self, batch: Sequence[TrainingSequence], chosen: slice, rate: float) -> None:
        """One optimizer step on part of the batch that `estimate` was given; ``rate`` is the policy's learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate * self._settings.algorithm.critic_rate
        part, old, targets = batch[chosen], self._old[chosen], self._targets[chosen]
        tokens = max(sum(map(len, targets)), 1)
        total = 0.0
        for micro_batch, values, counts in self._iterate_values(part):
            before, wanted = (torch.cat([known[index] for index in micro_batch.indices]) for known in (old, targets))
            loss = clip_values(values, before, wanted, self._settings.algorithm.value_clip).sum() / tokens
            total += loss.item() if counts else 0.0
            torch.autograd.backward(loss if self._shards.world == 1 else loss * (self._shards.world if counts else 0.0))
        self._losses.append(self._shards.sum_across([total])[0])
        self._shards.average_gradients(self._parts[1])
        bound = self._settings.learner.max_grad_norm
        norms = [gather_tensor(torch.nn.utils.clip_grad_norm_(part, bound)).item() for part in self._parts]
        if all(map(math.isfinite, norms)):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def metrics(self) -> dict[str, float]:
        """``value_loss``: the mean over the updates since `estimate`."""
        return {"value_loss": sum(self._losses) / max(len(self._losses), 1)}

    def collect_state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps of it."""
        tensors = [*models.iterate_tensors(self._model), *self._name_head()]
        return collect_state(tensors, [*self._model.named_parameters(), *self._name_head()], self._optimizer, STATE)

    def prepare_restore(self) -> None:
        """Before its tensors are read into."""
        prepare_moments(self._optimizer)

    def _name_head(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(f"value_head.{name}", parameter) for name, parameter in self._head.named_parameters()]

    def _compute_values(self, batch: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for micro_batch, values, _ in self._iterate_values(batch):
                counts = [int(batch[index].loss_mask.sum()) for index in micro_batch.indices]
                found |= zip(micro_batch.indices, torch.split(values.cpu(), counts), strict=True)
        found = self._shards.merge_across(found)
        return [found[index] for index in range(len(batch))]

    def _iterate_values(self, batch: Sequence[TrainingSequence]) -> Iterator[tuple[MicroBatch, torch.Tensor, bool]]:
        """Micro-batches with the value before each of their sampled tokens, float32 [N], and whether it counts."""
        settings, device = self._settings, self._model.device
        found = split_micro_batches(
            [sequence.ids for sequence in batch],
            [sequence.loss_mask for sequence in batch],
            prefix=0,
            size=settings.learner.micro_batch_size,
            budget=settings.trainer.token_budget,
            packing=settings.trainer.packing,
        )
        for each, counts in self._shards.split_items(list(found)):
            micro_batch = each.to(device)
            yield micro_batch, self._forward(micro_batch), counts

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        options: dict[str, object] = {"input_ids": batch.ids, "use_cache": False}
        if batch.positions is not None:
            options["position_ids"] = batch.positions
        precision: torch.dtype = getattr(torch, self._settings.trainer.precision)
        lower = precision != torch.float32 and self._shards.world == 1
        with torch.autocast(batch.ids.device.type, precision, enabled=lower):
            if self._shards.world == 1:
                hidden = self._model.base_model(**options).last_hidden_state
            else:  # a sharded model has to be entered at its top
                options |= {"logits_to_keep": 1} if supports_logits_to_keep(self._model) else {}
                hidden = self._model(**options, output_hidden_states=True).hidden_states[-1]
        values: torch.Tensor = self._head(hidden[batch.rows, batch.columns].float())[:, 0]
        return values
