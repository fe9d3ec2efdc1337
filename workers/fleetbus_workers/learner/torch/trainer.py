"""The trainer for any transformers causal language model: one process, or under ``torchrun`` one of several that share it.

Above is the learner, which calls it outside the event loop; below are torch and transformers. It draws no random numbers and
keeps dropout off, so that a batch, weights and `state` decide the next weights. Every process has to make the same calls:
`fleetbus_workers.learner.torch.distributed` sees to that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from fleetbus.errors import UserError
from fleetbus_schemas import TensorEntry
from fleetbus_workers.freed_memory import return_freed_memory
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.learner.base import FinishWriting, SequenceTokens, TrainingSequence
from fleetbus_workers.learner.hooks import load_loss
from fleetbus_workers.learner.minibatches import drop_non_finite, split_minibatches
from fleetbus_workers.learner.torch import model as models
from fleetbus_workers.learner.torch.advantages import add_teacher, apply_kl_penalty, normalise
from fleetbus_workers.learner.torch.batches import MicroBatch, find_shared_prefix, truncate_sequence
from fleetbus_workers.learner.torch.branches import can_branch, split_batches
from fleetbus_workers.learner.torch.checkpoint_files import read_into, start_writing
from fleetbus_workers.learner.torch.critic import Critic
from fleetbus_workers.learner.torch.forward import SharedPrefix, can_pack, can_share_prefix, compute_scores, find_head
from fleetbus_workers.learner.torch.loss import LossMetrics, SampledTokens, ScoredBatch, Totals, compute_loss
from fleetbus_workers.learner.torch.optimizer import build_optimizer, collect_state, compute_learning_rate, prepare_moments
from fleetbus_workers.learner.torch.reference import Reference
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharding import gather_tensor, init_shards, resolve_device
from fleetbus_workers.learner.torch.text_only import TextOnly
from fleetbus_workers.learner.torch.token_trace import TokenTrace
from fleetbus_workers.weights.file import WritingWatcher
from fleetbus_workers.weights.names import copy_companions

if TYPE_CHECKING:
    from fleetbus.core.algorithms.objectives import Objective
    from fleetbus_workers.learner.torch.images import TrainingImages

log = structlog.get_logger()


class InitialLogprobs(NamedTuple):
    """Log-probabilities of all sampled tokens before the first update, one tensor per sequence; None where not needed.

    ``proximal`` are the trainer's own, ``reference`` those of the model that the KL pulls to."""

    proximal: list[torch.Tensor] | None
    reference: list[torch.Tensor] | None


class TorchTrainer:
    """A model with its AdamW, as `fleetbus_workers.learner.base.Trainer`. Raises `UserError` for a wrong folder or setting."""

    def __init__(
        self, folder: Path, *, settings: TorchTrainerSettings | None = None, objective: Objective | None = None
    ) -> None:
        self.settings = settings or TorchTrainerSettings()
        self.settings.check()
        named = self.settings.algorithm.loss
        self._objective = objective or (load_loss(named) if named else None)
        torch.set_num_threads(self.settings.learner.threads)
        device = resolve_device(self.settings.trainer.device)
        precision: torch.dtype = getattr(torch, self.settings.trainer.precision)
        self.shards = init_shards(device, precision, self.settings.trainer.shard_processes)
        # A sharded model is cast as it is gathered: its shards, their gradients and their sums stay in float32.
        self._autocast = precision if self.shards.world == 1 else torch.float32
        self._float32_head = precision != torch.float32 and self.settings.trainer.head_precision == "float32"
        if device.type == "cuda" and precision != torch.float32:
            torch.set_float32_matmul_precision("high")
        self._folder = folder
        self._updates = 0
        self.differences: dict[str, float] = {}
        self.traced_tokens: list[SequenceTokens] = []
        self._writing: FinishWriting | None = None
        self.watcher: WritingWatcher | None = None
        self._model = models.load_model(folder, self.settings, device, self.shards)
        with torch.autocast(device.type, self._autocast, enabled=self._autocast != torch.float32):
            self._detect_capabilities()
        self._images = self._open_images()
        self._reference = Reference(folder, self._model, self.settings, device, self.shards)
        self._teacher = models.load_teacher(self._model, self.settings, device, self.shards)
        self._critic = Critic(folder, self.settings, device, self.shards) if self.settings.needs_critic else None
        if self.settings.trainer.lora_rank:
            models.add_adapters(self._model, self.settings.trainer)
        if self.settings.trainer.gradient_checkpointing:
            models.enable_gradient_checkpointing(self._model)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer([{"params": trained}], self.settings, self.shards, device)

    @property
    def vocabulary(self) -> int:
        """See `Trainer.vocabulary`: as many embeddings as the model has."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """See `Trainer.check_images`."""
        self._images.check_images(ids, images)

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """See `Trainer.train`. Further metrics: ``ratio_mean``, ``kl`` (k3, to the sampler), ``learning_rate``,
        ``skipped_updates`` (their gradient was not finite), ``sequences_excluded`` (numbers that are not finite),
        ``tokens_cut`` (beyond ``max_tokens``) and ``seconds``."""
        started = time.perf_counter()
        self.shards.enter_thread()
        if not batch or any(sequence.loss_mask[0] for sequence in batch):
            raise ValueError("a batch needs sequences, and none may begin with a sampled token")
        given, batch = len(batch), drop_non_finite(batch)
        longest = sum(len(sequence.ids) for sequence in batch)
        batch = [truncate_sequence(sequence, self.settings.trainer.max_tokens) for sequence in batch]
        measured = LossMetrics(TokenTrace(self.shards.world, on=self.settings.learner.keep_token_records > 0))
        norms: list[float] = []
        initial = self._compute_initial_logprobs(batch)
        batch, shaped = self._shape_advantages(batch, initial)
        rate = 0.0
        for _ in range(self.settings.trainer.epochs):
            for chosen in split_minibatches(len(batch), self.settings.learner.minibatches):
                rate = compute_learning_rate(self.settings, progress, self._updates)
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                fresh = version if not norms else None
                norms.append(self._update(batch, chosen, initial, measured, fresh))
                if self._critic is not None:
                    self._critic.update(batch, chosen, rate)
        self._reference.follow()
        measured.gather(self.shards)
        self.differences = measured.list_differences(batch)
        self.traced_tokens = measured.trace.collect(batch, self.shards)
        shaped |= self._critic.metrics if self._critic is not None else {}
        return_freed_memory()
        metrics = measured.metrics(len(norms), self.settings.trainer.epochs) | shaped
        return metrics | {
            "grad_norm": sum(norms) / len(norms),
            "skipped_updates": float(sum(not math.isfinite(norm) for norm in norms)),
            "learning_rate": rate,
            "sequences_excluded": float(given - len(batch)),
            "tokens_cut": float(longest - sum(len(sequence.ids) for sequence in batch)),
            "seconds": time.perf_counter() - started,
        }

    def compute_logprobs(self, batch: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """The log-probability of every sampled token of each sequence with the weights as they are, float32 [N]."""
        self.shards.enter_thread()
        limit = self.settings.trainer.max_tokens
        return self._compute_logprobs([truncate_sequence(sequence, limit) for sequence in batch], self._model)

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """See `Trainer.save_weights`. Raises `OSError`."""
        self.shards.enter_thread()
        dtype = torch.bfloat16 if self._publishes_rounded else None
        adapters = self.settings.trainer.published_weights == "adapters"
        write = models.write_adapters if adapters else models.write_model_weights
        return write(self._model, file, self.shards, dtype, self.watcher)

    def save_model(self, folder: Path) -> None:
        """See `Trainer.save_model`: the model's files, and copies of what lay beside them where it was loaded from."""
        self.shards.enter_thread()
        # First what takes all processes: an error before it would leave the others waiting for the leader's part.
        chosen = self._reference.model if self.settings.trainer.saved_model == "reference" else self._model
        models.write_model_weights(chosen or self._model, folder / SAFE_WEIGHTS_NAME, self.shards)
        if self.shards.rank == 0:
            copy_companions(self._folder, folder)
            self._model.config.save_pretrained(folder)

    def start_checkpoint(self, folder: Path) -> FinishWriting:
        """See `Trainer.start_checkpoint`: the weights as they are trained (with adapters: those alone), the optimizer's state
        and the number of updates, each process its own shards. No random numbers are drawn, so there are none to keep."""
        self.shards.enter_thread()
        self._forget_checkpoint()
        state = self._collect_state()
        state["updates"] = torch.tensor(self._updates)
        self._writing = start_writing(folder, state, self.shards)
        return self.finish_checkpoint

    def close(self) -> None:
        """Wait for what is being written, and leave the other processes."""
        self._forget_checkpoint()
        self.shards.close()

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises `OSError`."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing()

    def _forget_checkpoint(self) -> None:
        """Wait for the one before. That it failed was reported to whoever waited for it, which is the leader alone: a follower
        that raised here would end a training that continues without that checkpoint."""
        try:
            self.finish_checkpoint()
        except OSError as error:
            log.warning("checkpoint before was not written; continuing", process=self.shards.rank, reason=str(error))

    def restore(self, folder: Path) -> None:
        """See `Trainer.restore`. Raises `OSError` or, when the names or shapes are not this model's, `UserError`."""
        self.shards.enter_thread()
        prepare_moments(self._optimizer)
        if self._critic is not None:
            self._critic.prepare_restore()
        state = self._collect_state() | {"updates": torch.tensor(0)}
        with torch.no_grad():
            read_into(folder, state, self.shards)
        self._updates = int(state["updates"])
        self._reference.finish_restore(state)
        if not self._updates:
            self._optimizer.state.clear()

    def _collect_state(self) -> dict[str, torch.Tensor]:
        """Every tensor that training changes, by name."""
        adapted = self.settings.trainer.lora_rank > 0
        tensors = models.iterate_tensors(self._model, adapters=True)
        trained = ((name, tensor) for name, tensor in tensors if not adapted or tensor.requires_grad)
        state = collect_state(trained, self._model.named_parameters(), self._optimizer)
        state |= self._reference.collect_state()
        return state | (self._critic.collect_state() if self._critic is not None else {})

    def _list_trained(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def _publishes_rounded(self) -> bool:
        """True if what is published is less precise than what is trained."""
        return self.settings.trainer.published_dtype == "bfloat16" and self.settings.dtype == "float32"

    def _detect_capabilities(self) -> None:
        """Detect what the model supports (packing, prefix sharing, plain head) before it is sharded or wrapped."""
        settings = self.settings
        self._head = find_head(self._model, self.shards.world)
        # A sharded model has to be entered at its top, and checkpointed layers drop their cache.
        separate = self.shards.world > 1 or settings.trainer.packing or settings.trainer.gradient_checkpointing
        self._share = settings.share_prefix and not separate and can_share_prefix(self._model)
        self._branch = self._share and not settings.images and can_branch(self._model)
        if settings.trainer.packing and not can_pack(self._model):
            raise UserError(f"trainer.packing: packed sequences of {type(self._model).__name__} would see each other")

    def _open_images(self) -> TrainingImages | TextOnly:
        if not self.settings.images:
            return TextOnly()
        from fleetbus_workers.learner.torch.images import TrainingImages

        return TrainingImages(self._folder, self._model, processes=self.shards.world)

    def _compute_initial_logprobs(self, batch: Sequence[TrainingSequence]) -> InitialLogprobs:
        """Log-probabilities before the first update, as later updates and the KL term need them."""
        settings = self.settings
        several = settings.loss.uses_proximal and settings.trainer.epochs * settings.learner.minibatches > 1
        penalises = settings.algorithm.kl_coefficient > 0 and settings.algorithm.kl_place == "reward"
        proximal = self._compute_logprobs(batch, self._model) if several or penalises else None
        if self._reference.model is None:
            return InitialLogprobs(proximal, None)
        with self._reference.use():
            return InitialLogprobs(proximal, self._compute_logprobs(batch, self._reference.model))

    def _compute_logprobs(self, batch: Sequence[TrainingSequence], model: PreTrainedModel) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for scored in self._iterate_scored(batch, model):
                counts = [int(batch[index].loss_mask.sum()) for index in scored.batch.indices]
                found |= zip(scored.batch.indices, torch.split(scored.scores.logprobs, counts), strict=True)
        found = self.shards.merge_across(found)
        return [found[index].to(self._model.device) for index in range(len(batch))]

    def _shape_advantages(
        self, batch: Sequence[TrainingSequence], initial: InitialLogprobs
    ) -> tuple[Sequence[TrainingSequence], dict[str, float]]:
        """The batch with what settings add to its advantages token by token, and what was measured of that."""
        algorithm = self.settings.algorithm
        batch, measured = (batch, {}) if self._critic is None else self._critic.estimate(batch)
        if algorithm.kl_coefficient and algorithm.kl_place == "reward":
            assert initial.proximal is not None
            batch = apply_kl_penalty(batch, algorithm, initial.proximal, initial.reference)
        if self.settings.learner.advantage_estimator == "reinforce_plus_plus":
            batch = normalise(batch)
        if self._teacher is not None:
            found = self._compute_logprobs(batch, self._teacher)
            batch, measured["teacher_kl"] = add_teacher(batch, algorithm.teacher_coefficient, found)
        return batch, measured

    def _update(
        self,
        batch: Sequence[TrainingSequence],
        chosen: slice,
        initial: InitialLogprobs,
        measured: LossMetrics,
        fresh: int | None,
    ) -> float:
        """One optimizer step on part of the batch; returns the norm of its gradient before clipping.

        ``fresh`` is the version whose tokens were sampled with the weights as they are now.
        """
        part = batch[chosen]
        totals = Totals.from_sequences(part, self.settings.loss)
        proximal, reference = (known[chosen] if known is not None else None for known in initial)
        measured.trace.first = chosen.start
        plan = self.settings.loss
        for micro_batch, tokens, scores, counts in self._iterate_scored(part, self._model):
            loss = compute_loss(
                plan,
                micro_batch,
                tokens,
                scores,
                proximal=_concatenate(proximal, micro_batch),
                reference=_concatenate(reference, micro_batch),
                totals=totals,
                measured=measured if counts else LossMetrics(),
                objective=self._objective,
            )
            if counts and fresh is not None:
                measured.add_differences(tokens, scores.logprobs.detach(), tokens.versions == fresh)
            if loss.requires_grad:
                # Shards average their gradients; the loss is a sum over all micro-batches.
                torch.autograd.backward(loss if self.shards.world == 1 else loss * (self.shards.world if counts else 0.0))
        self.shards.average_gradients(self._list_trained())
        norm = gather_tensor(torch.nn.utils.clip_grad_norm_(self._list_trained(), self.settings.learner.max_grad_norm)).item()
        if math.isfinite(norm):
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _iterate_scored(self, batch: Sequence[TrainingSequence], model: PreTrainedModel) -> Iterator[ScoredBatch]:
        """Micro-batches with scores of their sampled tokens; when it ends, gradients have gone through the shared prefix."""
        device = self._model.device
        masks = [sequence.loss_mask for sequence in batch]
        ids, inputs = self._images.encode_images(batch)
        teaches = model is self._teacher
        plain_head, whole_logits = find_head(model, self.shards.world) if teaches else self._head
        length = find_shared_prefix(ids, masks) if self._share and not teaches else 0
        precision = self._autocast
        prefix = None
        if length:
            with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                prefix = SharedPrefix(model, torch.from_numpy(ids[0][:length].astype(np.int64)).to(device), inputs)
        for learns, subset in self._partition_by_gradient(batch):
            found = split_batches(
                ids,
                masks,
                [f"{each.group_id} {each.temperature}" for each in batch] if self._branch and not teaches else (),
                subset,
                prefix=length,
                size=self.settings.learner.micro_batch_size,
                budget=self.settings.trainer.token_budget,
                packing=self.settings.trainer.packing,
            )
            for each, counts in (
                self.shards.split_items(list(found)) if self.shards.world > 1 else ((each, True) for each in found)
            ):
                micro_batch, tokens = each.to(device), SampledTokens.from_sequences(batch, each.indices, device)
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    scores = compute_scores(
                        model,
                        micro_batch,
                        prefix=prefix,
                        temperature=tokens.temperature,
                        plain_head=plain_head,
                        whole_logits=whole_logits,
                        precision=precision,
                        float32_head=self._float32_head,
                        inputs=inputs,
                        entropy_gradient=self.settings.algorithm.entropy_coefficient > 0,
                    )
                yield ScoredBatch(micro_batch, tokens, scores, counts)
        if prefix is not None:
            prefix.close()

    def _partition_by_gradient(
        self, batch: Sequence[TrainingSequence]
    ) -> tuple[tuple[bool, list[int]], tuple[bool, list[int]]]:
        """Indices of sequences that have a gradient, and of those that are only measured: their advantage is zero."""
        algorithm = self.settings.algorithm
        has_kl_loss = algorithm.kl_coefficient and algorithm.kl_place == "loss"
        always = bool(has_kl_loss or algorithm.entropy_coefficient or self._objective is not None)
        idle = [not sequence.advantages.any() and not always for sequence in batch]
        return (
            (True, [index for index, still in enumerate(idle) if not still]),
            (False, [index for index, still in enumerate(idle) if still]),
        )


def _concatenate(known: list[torch.Tensor] | None, batch: MicroBatch) -> torch.Tensor | None:
    return None if known is None else torch.cat([known[index] for index in batch.indices])
