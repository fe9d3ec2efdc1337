"""The trainer for any transformers causal language model: one process, one device.

Above is the learner, which calls it outside the event loop; below are torch and transformers. It draws no random numbers and
keeps dropout off, so that a batch, weights and `state` decide the next weights.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fleetbus.errors import UserError
from schemas import TensorEntry
from workers.learner.base import TrainingSequence
from workers.learner.torch.batches import MicroBatch, micro_batches, shared_prefix
from workers.learner.torch.forward import Scores, SharedPrefix, can_share, head_is_plain, score
from workers.learner.torch.loss import Measured, SampledTokens, Totals, measured_loss
from workers.learner.torch.settings import TorchTrainerSettings
from workers.weights import write_weights

_COMPANIONS = (".json", ".jinja", ".txt", ".model")
"""Suffixes of what lies beside the weights in a model folder: tokenizer, template, vocabulary."""


class TorchTrainer:
    """A model with its AdamW, as `workers.learner.base.Trainer`. Raises `UserError` when the folder or a setting is wrong."""

    def __init__(self, folder: Path, *, settings: TorchTrainerSettings | None = None) -> None:
        self.settings = settings or TorchTrainerSettings()
        self.settings.check()
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        self._folder = folder
        self._model = _load(folder, self.settings)
        self._updates = 0
        self._plain_head = head_is_plain(self._model)
        self._share = self.settings.share_prefix and can_share(self._model)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """See `Trainer.train`. Further metrics: ``ratio_mean``, ``kl`` (k3, to the sampler), ``learning_rate``,
        ``skipped_updates`` (their gradient was not finite) and ``seconds``."""
        started = time.perf_counter()
        if not batch or any(sequence.loss_mask[0] for sequence in batch):
            raise ValueError("a batch needs sequences, and none may begin with a sampled token")
        measured = Measured()
        norms: list[float] = []
        proximal = self._proximal(batch)
        rate = 0.0
        for _ in range(self.settings.epochs):
            for chosen in _split(len(batch), self.settings.minibatches):
                rate = self._schedule(progress)
                fresh = version if not norms else None
                norms.append(self._update(batch, chosen, proximal, measured, fresh))
        return measured.metrics(len(norms), self.settings.epochs) | {
            "grad_norm": sum(norms) / len(norms),
            "skipped_updates": float(sum(not math.isfinite(norm) for norm in norms)),
            "learning_rate": rate,
            "seconds": time.perf_counter() - started,
        }

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """See `Trainer.save_weights`. Raises `OSError`."""
        return write_weights(file, self._model.state_dict())

    def save_model(self, folder: Path) -> None:
        """See `Trainer.save_model`: the model's files, and copies of what lay beside them where it was loaded from."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            if file.suffix in _COMPANIONS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        transformers_logging.disable_progress_bar()
        self._model.save_pretrained(folder)

    def save_state(self, file: Path) -> None:
        """See `Trainer.save_state`: the optimizer's, and the number of updates. No random numbers are drawn."""
        torch.save({"optimizer": self._optimizer.state_dict(), "updates": self._updates}, file)

    def restore(self, weights: Path, state: Path) -> None:
        """See `Trainer.restore`. Raises `OSError` or, when the names or shapes are not this model's, `UserError`."""
        try:
            tensors = load_file(weights)
            missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        except (RuntimeError, SafetensorError) as error:
            raise UserError(f"{weights} does not fit the model of {self._folder}: {error}") from error
        own = self._model.state_dict()
        stored = {own[name].data_ptr() for name in tensors if name in own}
        if unexpected or any(own[name].data_ptr() not in stored for name in missing):
            raise UserError(f"{weights} does not fit the model of {self._folder}: missing {missing}, unknown {unexpected}")
        stored_state = torch.load(state, weights_only=True)
        self._optimizer.load_state_dict(stored_state["optimizer"])
        self._updates = int(stored_state["updates"])

    def _schedule(self, progress: float) -> float:
        decayed = 1.0 - (1.0 - self.settings.decayed_to) * min(max(progress, 0.0), 1.0)
        warmed = min(1.0, (self._updates + 1) / max(self.settings.warmup_updates, 1))
        rate = self.settings.learning_rate * decayed * warmed
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _proximal(self, batch: Sequence[TrainingSequence]) -> list[torch.Tensor] | None:
        """The log-probabilities of all sampled tokens before the first update, where a later update will need them."""
        if self.settings.correction == "none" or self.settings.epochs * self.settings.minibatches == 1:
            return None
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for micro_batch, _, scores in self._scored(batch):
                counts = [int(batch[index].loss_mask.sum()) for index in micro_batch.indices]
                found |= zip(micro_batch.indices, torch.split(scores.logprobs, counts), strict=True)
        return [found[index] for index in range(len(batch))]

    def _update(
        self,
        batch: Sequence[TrainingSequence],
        chosen: slice,
        proximal: list[torch.Tensor] | None,
        measured: Measured,
        fresh: int | None,
    ) -> float:
        """One optimizer step on part of the batch; returns the norm of its gradient before clipping.

        ``fresh`` is the version whose tokens were sampled with the weights as they are now.
        """
        part = batch[chosen]
        totals = Totals.of(part)
        before = proximal[chosen] if proximal is not None else None
        for micro_batch, tokens, scores in self._scored(part):
            known = torch.cat([before[index] for index in micro_batch.indices]) if before is not None else None
            loss = measured_loss(self.settings, micro_batch, tokens, scores, proximal=known, totals=totals, measured=measured)
            if fresh is not None:
                measured.add_differences((scores.logprobs.detach() - tokens.logprobs)[tokens.versions == fresh])
            if loss.requires_grad:
                torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.settings.gradient_norm).item()
        if math.isfinite(norm):
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _scored(self, batch: Sequence[TrainingSequence]) -> Iterator[tuple[MicroBatch, SampledTokens, Scores]]:
        """Micro-batches with scores of their sampled tokens; when it ends, gradients have gone through the shared prefix."""
        device = self._model.device
        ids, masks = [sequence.ids for sequence in batch], [sequence.loss_mask for sequence in batch]
        length = shared_prefix(ids, masks) if self._share else 0
        prefix = SharedPrefix(self._model, torch.from_numpy(ids[0][:length].astype(np.int64)).to(device)) if length else None
        for learns, among in self._parted(batch):
            for found in micro_batches(ids, masks, prefix=length, size=self.settings.micro_batch_size, among=among):
                micro_batch, tokens = found.to(device), SampledTokens.of(batch, found.indices, device)
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    scores = score(
                        self._model, micro_batch, prefix=prefix, temperature=tokens.temperature, plain_head=self._plain_head
                    )
                yield micro_batch, tokens, scores
        if prefix is not None:
            prefix.close()

    def _parted(self, batch: Sequence[TrainingSequence]) -> tuple[tuple[bool, list[int]], tuple[bool, list[int]]]:
        """Indices of sequences that have a gradient, and of those that are only measured: their advantage is zero."""
        idle = [not sequence.advantages.any() and not self.settings.kl_coefficient for sequence in batch]
        return (
            (True, [index for index, still in enumerate(idle) if not still]),
            (False, [index for index, still in enumerate(idle) if still]),
        )


def _split(count: int, parts: int) -> list[slice]:
    """``count`` sequences in at most ``parts`` runs of nearly equal length, none empty."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]


def _load(folder: Path, settings: TorchTrainerSettings) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, settings.dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no model that transformers can load: {error}") from error
    loaded: PreTrainedModel = model.to(settings.device).eval()
    return loaded
