"""Recorded tokens checked by one forward pass: does the sampler choose them again from what the model gives at their places?

A `ScoringSampler` stands between the inference worker under test and its torch sampler. Before a version's turns are played,
their recorded histories run through the model together, and the sampler's own choice of a token is made at every place, from
the recorded seed. A turn whose every token is chosen again, and which ends where the sampler would end it, is answered with
them; any other is handed to the torch sampler, token by token, and what comes of it is compared. So a turn is never taken
for right without proof, and never for wrong because sums were added up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from schemas import PolicyPublished, VersionSpan
from workers.images.folders import has_vision
from workers.inference.base import Generation, GenerationRequest, Sampler
from workers.inference.torch import TorchSampler
from workers.inference.torch.choosing import choose
from workers.inference.torch.turn import Turn
from workers.learner.torch.batches import MicroBatch, micro_batches, shared_prefix
from workers.learner.torch.forward import SharedPrefix, can_share, head_is_plain
from workers.replay.expected import Expected
from workers.weights import read_weights, unique_tensors

ROWS, TOKENS = 64, 8192
"""Most sequences and tokens of a forward pass."""

LOGITS = 1 << 23
"""Most logits at once."""


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of which every token is chosen again; ``logprobs`` are those of the forward pass."""

    expected: Expected
    logprobs: list[float]


class ScoringSampler:
    """`Sampler` that answers what the recording proves and leaves the rest to ``sampler``; ``folder`` is its model's.

    ``proved`` and ``sampled`` count turns, ``tokens`` what ran through the model; ``forward_seconds`` are those of the bare
    forward passes, ``seconds`` of all that scoring took.
    """

    def __init__(self, sampler: Sampler, folder: Path, *, max_length: int, threads: int = 1) -> None:
        from transformers import AutoModelForCausalLM

        self._sampler = sampler
        self._max_length = max_length
        self._threads = threads
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.eval().requires_grad_(False)
        self._parameters = unique_tensors(self._model.state_dict())
        self._vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        self._shares, self._plain_head = can_share(self._model), head_is_plain(self._model)
        self._known: dict[tuple[str, int], Proved] = {}
        self.proved = self.sampled = self.tokens = 0
        self.seconds = self.forward_seconds = 0.0

    @property
    def version(self) -> int:
        return self._sampler.version

    @version.setter
    def version(self, value: int) -> None:
        self._sampler.version = value

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._sampler.running()

    async def load(self, policy: PolicyPublished) -> None:
        """The sampler validates; what it rejects is loaded nowhere."""
        self._known.clear()
        await self._sampler.load(policy)
        await anyio.to_thread.run_sync(self._adopt, read_weights(policy.uri, policy.manifest))

    def forget(self, cache_key: str) -> None:
        self._sampler.forget(cache_key)

    async def prepare(self, turns: Sequence[Expected]) -> None:
        """Score these turns under the loaded version; what does not prove itself is sampled when it is asked for."""
        began = anyio.current_time()
        self._known = await anyio.to_thread.run_sync(self._prove, turns)
        self.seconds += anyio.current_time() - began

    async def generate(self, request: GenerationRequest) -> Generation:
        known = self._known.get((request.cache_key, len(request.ids)))
        generation = known and _answer(known, request, self._max_length, self.version)
        if not generation:
            self.sampled += 1
            return await self._sampler.generate(request)
        self.proved += 1
        return generation

    def _adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def _prove(self, turns: Sequence[Expected]) -> dict[tuple[str, int], Proved]:
        torch.set_num_threads(self._threads)
        by_episode: dict[str, list[Expected]] = {}
        for turn in turns:
            by_episode.setdefault(turn.request.cache_key, []).append(turn)
        with torch.inference_mode():
            proved = [each for batch in self._batches(list(by_episode.values())) for each in self._chosen_again(*batch)]
        return {(each.expected.request.cache_key, len(each.expected.ids)): each for each in proved}

    def _batches(self, episodes: list[list[Expected]]) -> Iterator[tuple[list[Expected], MicroBatch, SharedPrefix | None]]:
        """Turns with the pass that scores them, each within its episode's longest history here."""
        sequences = [np.concatenate((turns[-1].ids, turns[-1].sampled)) for turns in episodes]
        masks = [_mask(len(ids), turns) for ids, turns in zip(sequences, episodes, strict=True)]
        prefix = shared_prefix(sequences, masks) if self._shares else 0
        shared = SharedPrefix(self._model, torch.from_numpy(sequences[0][:prefix])) if prefix else None
        self.tokens += prefix
        budget = TOKENS if self._plain_head else max(LOGITS // self._vocabulary, 1)
        for batch in micro_batches(sequences, masks, prefix=prefix, size=ROWS, budget=budget):
            self.tokens += sum(len(sequences[index]) - prefix for index in batch.indices)
            yield [turn for index in batch.indices for turn in episodes[index]], batch, shared

    def _chosen_again(self, turns: Sequence[Expected], batch: MicroBatch, shared: SharedPrefix | None) -> Iterator[Proved]:
        """Those of which the sampler's own choice is the recorded token at every place."""
        counts = [len(turn.sampled) for turn in turns]
        drawn = [Turn(turn.request, self._max_length) for turn in turns]
        places = [turn for turn, count in zip(drawn, counts, strict=True) for _ in range(count)]
        ids: list[int] = []
        logprobs: list[float] = []
        for logits in self._logits(batch, shared):
            here = places[len(ids) : len(ids) + len(logits)]
            uniforms = np.fromiter((turn.uniform() for turn in here), np.float32, len(here))
            chosen, under = choose(logits, uniforms, [turn.temperature for turn in here], [turn.top_p for turn in here])
            ids += chosen
            logprobs += under
        start = 0
        for turn, count in zip(turns, counts, strict=True):
            if ids[start : start + count] == turn.sampled.tolist():
                yield Proved(expected=turn, logprobs=logprobs[start : start + count])
            start += count

    def _logits(self, batch: MicroBatch, shared: SharedPrefix | None) -> Iterator[torch.Tensor]:
        """Float32 [n, vocabulary] where tokens were sampled, sequence by sequence in the order of ``batch.indices``."""
        began = perf_counter()
        options: dict[str, Any] = {"use_cache": False}
        if shared is not None:
            options = {"use_cache": True, "past_key_values": shared.cache(len(batch.ids))}
        if not self._plain_head:
            logits = self._model(input_ids=batch.ids, **options).logits[batch.rows, batch.columns].float()
            self.forward_seconds += perf_counter() - began
            yield logits
            return
        hidden = self._model.base_model(input_ids=batch.ids, **options).last_hidden_state[batch.rows, batch.columns]
        for part in hidden.split(max(LOGITS // self._vocabulary, 1)):
            logits = self._model.get_output_embeddings()(part).float()
            self.forward_seconds += perf_counter() - began
            yield logits
            began = perf_counter()


def scoring_sampler(sampler: Sampler, folder: Path, *, max_length: int, threads: int) -> ScoringSampler | None:
    """In front of a torch sampler of a causal language model of text; None in front of any other."""
    if type(sampler) is not TorchSampler or has_vision(folder):
        return None
    return ScoringSampler(sampler, folder, max_length=max_length, threads=threads)


def _mask(length: int, turns: Sequence[Expected]) -> NDArray[np.bool_]:
    mask = np.zeros(length, dtype=np.bool_)
    for turn in turns:
        mask[len(turn.ids) : len(turn.ids) + len(turn.sampled)] = True
    return mask


def _answer(known: Proved, request: GenerationRequest, max_length: int, version: int) -> Generation | None:
    """The recorded tokens if this request is the one that they were proved for, and if it ends where they end."""
    expected, turn = known.expected, Turn(request, max_length)
    same = (request.seed, request.sampling) == (expected.request.seed, expected.request.sampling)
    if not same or not np.array_equal(turn.ids, expected.ids):
        return None
    ids = expected.sampled.tolist()
    stops = [index for index, token in enumerate(ids) if token in turn.stop_ids]
    if len(ids) > turn.limit or stops not in ([], [len(ids) - 1]) or not (stops or len(ids) == turn.limit):
        return None
    return Generation(
        ids=ids,
        logprobs=known.logprobs,
        finish_reason="stop" if stops else "length",
        versions=(VersionSpan(version=version, start=0, stop=len(ids)),),
    )
