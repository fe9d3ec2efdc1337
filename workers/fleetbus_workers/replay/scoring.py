"""Recorded tokens checked by one forward pass: does the sampler choose them again from what the model computes at their places?

Before a version's turns are played, their recorded histories run through the model together, and the sampler's own choice of a
token is made at every place, from the recorded seed. A turn whose every token is chosen again, and which ends where the sampler
would end it, is answered with them; any other is sampled token by token, and the result is compared. So no turn is accepted
without proof, and none rejected because sums were added up in another order. A few are sampled all
the same, to test the engine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from fleetbus.config.settings import InferenceSettings
from fleetbus_schemas import PolicyPublished, SamplingSettings, VersionSpan
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.torch.sampling import UNIFORM_BITS, sample_tokens
from fleetbus_workers.inference.torch.turn import Turn
from fleetbus_workers.learner.torch.batches import MicroBatch, find_shared_prefix, split_micro_batches
from fleetbus_workers.learner.torch.forward import SharedPrefix, can_share_prefix, has_plain_head
from fleetbus_workers.replay.report import FORWARD, SCORING, Report
from fleetbus_workers.replay.token_histories import ExpectedTurn, History, merge_histories
from fleetbus_workers.replay.watched_sampler import WatchedSampler
from fleetbus_workers.weights.adapters import read_version
from fleetbus_workers.weights.file import unique_tensors
from fleetbus_workers.weights.forward_cache import build_cache_options

ROWS, TOKENS = 16, 4096
"""Most sequences and tokens of a forward pass: with more, a few long ones make many short ones long."""

LOGITS = 1 << 23
"""Most logits at once."""

BOUNDARY = 1e-5
"""How far from a drawn number the recorded token may begin or end: sums in another order move cumulative probabilities by about
that much, and of a million tokens a few lie so close to the next."""

ALWAYS_SAMPLED = 128
"""One turn in so many, beginning with the first of every version, is sampled although it is proved: else an engine that broke
would not be noticed."""


class ProvedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of which every token is chosen again; ``logprobs`` are those of the forward pass."""

    expected: ExpectedTurn
    logprobs: list[float]


class ScoringSampler(WatchedSampler):
    """`Sampler` that answers with the recorded tokens where they are proved and leaves the rest to ``sampler``; ``folder`` is
    the folder of its model.

    ``proved`` and ``sampled`` count turns, ``tokens`` what ran through the model; ``forward_seconds`` are those of the bare
    forward passes, ``seconds`` of all that scoring took.
    """

    def __init__(self, sampler: Sampler, folder: Path, *, max_model_len: int, threads: int = 1) -> None:
        super().__init__(sampler)
        self._folder = folder
        self._max_model_len = max_model_len
        self._threads = threads
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.eval().requires_grad_(False)
        self._parameters = unique_tensors(self._model.state_dict())
        self._vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        self._shares, self._plain_head = can_share_prefix(self._model), has_plain_head(self._model)
        self._proved: dict[tuple[str, int], ProvedTurn] = {}
        self.proved = self.sampled = self.tokens = 0
        self.seconds = self.forward_seconds = 0.0

    async def load_version(self, policy: PolicyPublished) -> None:
        """The sampler validates; what it rejects is not loaded for scoring either."""
        self._proved.clear()
        await super().load_version(policy)
        await anyio.to_thread.run_sync(self._copy_weights, read_version(policy, self._folder))

    async def prepare(self, turns: Iterable[ExpectedTurn]) -> None:
        """Score these turns under the loaded version; what is not proved is sampled when it is asked for."""
        began = anyio.current_time()
        self._proved = await anyio.to_thread.run_sync(self._prove, list(turns))
        self.seconds += anyio.current_time() - began

    async def generate(self, request: GenerationRequest) -> Generation:
        proved = self._proved.get((request.history_key, len(request.ids)))
        generation = proved and build_generation(proved, request, self._max_model_len, self.version)
        if not generation:
            self.sampled += 1
            return await super().generate(request)
        self.proved += 1
        return generation

    def describe(self, report: Report) -> None:
        """Say in the report how its tokens were checked."""
        report.checked = "tokens are those that the sampler chooses from a forward pass over them, or sampled again"
        report.notes["turns that a forward pass showed to be sampled so"] += self.proved
        report.notes["turns sampled again"] += self.sampled
        report.notes["tokens through the model at once"] += self.tokens
        report.measured = {FORWARD: self.forward_seconds, SCORING: self.seconds}

    def _copy_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def _prove(self, turns: Sequence[ExpectedTurn]) -> dict[tuple[str, int], ProvedTurn]:
        torch.set_num_threads(self._threads)
        histories = merge_histories(turns)
        with torch.inference_mode():
            proved = [each for batch in self._plan_passes(histories) for each in self._select_proved(histories, *batch)]
        named = {(each.expected.request.history_key, len(each.expected.ids)): each for each in proved}
        return {
            name: each
            for number, (name, each) in enumerate(sorted(named.items(), key=lambda item: item[0]))
            if number % ALWAYS_SAMPLED
        }

    def _plan_passes(self, histories: Sequence[History]) -> Iterator[tuple[MicroBatch, SharedPrefix | None]]:
        """The passes that score these histories."""
        ids, masks = [history.ids for history in histories], [history.mask for history in histories]
        prefix = find_shared_prefix(ids, masks) if self._shares else 0
        shared = SharedPrefix(self._model, torch.from_numpy(ids[0][:prefix])) if prefix else None
        self.tokens += prefix + sum(len(each) - prefix for each in ids)
        budget = TOKENS if self._plain_head else max(LOGITS // self._vocabulary, 1)
        for batch in split_micro_batches(ids, masks, prefix=prefix, size=ROWS, budget=budget):
            yield batch, shared

    def _select_proved(
        self, histories: Sequence[History], batch: MicroBatch, shared: SharedPrefix | None
    ) -> Iterator[ProvedTurn]:
        """Those turns of which the sampler's own choice is the recorded token at every place, up to `BOUNDARY`."""
        here = [histories[index] for index in batch.indices]
        starts = np.cumsum([0, *(history.mask.sum() for history in here)])
        places = [start + history.find_places() for start, history in zip(starts, here, strict=False)]
        turns = [turn for history in here for turn in history.turns]
        ids, logprobs = self._choose(turns, self._compute_hidden(batch, shared), torch.from_numpy(np.concatenate(places)))
        start = 0
        for turn in turns:
            stop = start + len(turn.sampled)
            if ids[start:stop] == turn.sampled.tolist():
                yield ProvedTurn(expected=turn, logprobs=logprobs[start:stop])
            start = stop

    def _choose(
        self, turns: Sequence[ExpectedTurn], hidden: torch.Tensor, places: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """The sampler's choice for each token of ``turns``; ``places`` [n] says which row of ``hidden`` comes before it."""
        drawn = [Turn(turn.request, self._max_model_len) for turn in turns]
        owners = [turn for turn, expected in zip(drawn, turns, strict=True) for _ in expected.sampled]
        recorded = [token for turn in turns for token in turn.sampled.tolist()]
        ids: list[int] = []
        logprobs: list[float] = []
        size = max(LOGITS // self._vocabulary, 1)
        for part in (places[start : start + size] for start in range(0, len(places), size)):
            here = owners[len(ids) : len(ids) + len(part)]
            uniforms = np.fromiter((turn.draw_uniform() for turn in here), np.float32, len(here))
            logits = self._compute_logits(hidden[part])
            settings = [turn.request.sampling for turn in here]
            chosen, under = sample_tokens_near(logits, uniforms, settings, recorded[len(ids) : len(ids) + len(part)])
            ids += chosen
            logprobs += under
        return ids, logprobs

    def _compute_hidden(self, batch: MicroBatch, shared: SharedPrefix | None) -> torch.Tensor:
        """The model's hidden states of the tokens before sampled ones, history by history; without a plain head the logits."""
        began = perf_counter()
        options: dict[str, object] = {"use_cache": False}
        if shared is not None:
            options = build_cache_options(self._model, shared.cache(len(batch.ids)))
        if self._plain_head:
            made = self._model.base_model(input_ids=batch.ids, **options).last_hidden_state
        else:
            made = self._model(input_ids=batch.ids, **options).logits
        found: torch.Tensor = made[batch.rows, batch.columns]
        self.forward_seconds += perf_counter() - began
        return found

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [n, vocabulary]."""
        began = perf_counter()
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden) if self._plain_head else hidden
        self.forward_seconds += perf_counter() - began
        return logits.float()


def sample_tokens_near(
    logits: torch.Tensor, uniforms: NDArray[np.float32], settings: Sequence[SamplingSettings], recorded: Sequence[int]
) -> tuple[list[int], list[float]]:
    """`sample_tokens`, but the recorded token where a number at most `BOUNDARY` away would have chosen it."""
    ids, logprobs = sample_tokens(logits, uniforms, settings)
    for row in (row for row, token in enumerate(recorded) if token != ids[row]):
        near = uniforms[row] + np.array([-BOUNDARY, BOUNDARY], np.float32)
        near = near.clip(0.0, 1.0 - 2.0**-UNIFORM_BITS).astype(np.float32)
        tokens, under = sample_tokens(logits[[row, row]], near, [settings[row]] * 2)
        if recorded[row] in tokens:
            ids[row], logprobs[row] = recorded[row], under[tokens.index(recorded[row])]
    return ids, logprobs


def make_scoring_sampler(sampler: Sampler, folder: Path, settings: InferenceSettings) -> ScoringSampler | None:
    """In front of a torch sampler of a causal language model of text; None in front of any other."""
    if type(sampler) is not TorchSampler or has_vision(folder):
        return None
    return ScoringSampler(sampler, folder, max_model_len=settings.max_model_len, threads=settings.threads)


def build_generation(proved: ProvedTurn, request: GenerationRequest, max_model_len: int, version: int) -> Generation | None:
    """The recorded tokens if this request is the one that they were proved for, and if it ends where they end."""
    expected, turn = proved.expected, Turn(request, max_model_len)
    same = (request.seed, request.sampling) == (expected.request.seed, expected.request.sampling)
    if not same or not np.array_equal(turn.ids, expected.ids):
        return None
    ids = expected.sampled.tolist()
    stops = [index for index, token in enumerate(ids) if token in turn.stop_ids]
    if len(ids) > turn.limit or stops not in ([], [len(ids) - 1]) or not (stops or len(ids) == turn.limit):
        return None
    return Generation(
        ids=ids,
        logprobs=proved.logprobs,
        finish_reason="stop" if stops else "length",
        versions=(VersionSpan(version=version, start=0, stop=len(ids)),),
    )
