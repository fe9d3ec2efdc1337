"""The data that cross from the event loop to the engine's thread and back: a turn to sample, a version to swap to."""

import random
from typing import Any

import anyio
import numpy as np

from fleetbus_schemas import FinishReason, VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.torch.kv_cache import Ids
from fleetbus_workers.inference.torch.sampling import UNIFORM_BITS


class EngineOperation:
    """Something that the event loop waits for. The thread sets ``failure`` or the result, then the event loop `done`."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.failure: str | None = None


class WeightSwap(EngineOperation):
    """A validated version in the form that the runner adopts."""

    def __init__(self, version: int, prepared: Any) -> None:
        super().__init__()
        self.version = version
        self.prepared = prepared


class Turn(EngineOperation):
    """One request and what has been sampled for it. Touched by the engine's thread alone once it was handed over, except
    ``abandoned``, which the event loop sets when the caller no longer waits."""

    def __init__(self, request: GenerationRequest, max_model_len: int) -> None:
        super().__init__()
        self.request = request
        self.ids: Ids = np.array(request.ids, dtype=np.int64)
        self.images: tuple[Any, ...] = ()
        """The images that negative ids stand for, processed for the model; see `fleetbus_workers.images.embedding`."""
        self.stop_ids = request.stop_ids
        self.limit = min(request.max_tokens, max_model_len - len(self.ids))
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.abandoned = False
        self.generation: Generation | None = None
        self.start_version = -1
        """The version that its first keys and values come from."""
        self.shared = 0
        """How many of its first ids are the engine's reference prompt."""
        self._starts: list[tuple[int, int]] = []
        self._random = random.Random(request.seed)

    def draw_uniform(self) -> float:
        """The next number in [0, 1) that decides a token: a function of the seed and the token's index alone."""
        return self._random.getrandbits(UNIFORM_BITS) / (1 << UNIFORM_BITS)

    def start(self, version: int) -> None:
        """Its first keys and values, and its next tokens, come from this version."""
        self.start_version = version
        self.record_version(version)

    def record_version(self, version: int) -> None:
        """The next tokens come from this version."""
        self._starts.append((version, len(self.sampled)))

    def finish(self, reason: FinishReason) -> None:
        stops = [start for _, start in self._starts[1:]] + [len(self.sampled)]
        spans = [
            VersionSpan(version=version, start=start, stop=stop)
            for (version, start), stop in zip(self._starts, stops, strict=True)
            if stop > start
        ]
        self.generation = Generation(ids=self.sampled, logprobs=self.logprobs, finish_reason=reason, versions=tuple(spans))
