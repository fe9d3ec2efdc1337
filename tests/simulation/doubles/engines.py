"""An engine for simulations: its tokens depend on the whole history, the version and the seed, as those of a model do.

So a wrong history, a wrong version or a wrong seed shows in the tokens, and `compute_sampled_ids` tells what they have to be.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec

from fleetbus_schemas import PolicyPublished, VersionSpan
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, WeightsRejected
from fleetbus_workers.inference.scripted import STOP, StubSampler
from tests.simulation.doubles.environments import is_selected
from tests.simulation.observer import Observer
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import CALM, FaultProfile

TOKENS = 8


def compute_sampled_ids(ids: Sequence[int], versions: Sequence[VersionSpan], seed: int) -> list[int]:
    """What the engine samples after ``ids``; the last id stops the turn."""
    history = pack_ids(ids)
    sampled: list[int] = []
    for span in versions:
        name = f"{seed}/{span.version}".encode()
        digest = hashlib.blake2b(history, key=name[:64], digest_size=TOKENS).digest()
        sampled += [2 + byte % 254 for byte in digest[span.start : span.stop]]
    return [*sampled[:-1], STOP]


class SimulatedSampler(StubSampler):
    """See `fleetbus_workers.inference.base.Sampler`."""

    def __init__(
        self, process: Process, fault_profile: FaultProfile, *, seed: int, draw: random.Random, observer: Observer
    ) -> None:
        self.version = -1
        self._process = process
        self._fault_profile = fault_profile
        self._seed = seed
        self._draw = draw
        self._observer = observer

    @property
    def _mischief(self) -> FaultProfile:
        return CALM if self._observer.has_healed else self._fault_profile

    async def generate(self, request: GenerationRequest) -> Generation:
        self._process.hold(generations=1)
        try:
            return await self._generate(request)
        finally:
            self._process.hold(generations=-1)

    async def load(self, policy: PolicyPublished) -> None:
        self._process.rejected_at = None
        await anyio.sleep(0.2 * self._draw.random())
        self._check_weights(policy)
        if self.version >= 0 and self._draw.random() < self._mischief.weights_rejected:
            self._observer.disturb("weights_rejected", self._process.name)
            self._process.rejected_at = anyio.current_time()
            raise WeightsRejected("a tensor is not finite")
        self.version = policy.version

    def _check_weights(self, policy: PolicyPublished) -> None:
        """What was fetched are the weights that the version's step made, whatever happened on their way."""
        try:
            updates = json.loads(Path(urlsplit(policy.uri).path).read_text())["updates"]
        except OSError as error:  # an old version, whose file is gone
            raise WeightsRejected(f"{policy.uri}: {error}") from error
        name = f"{self._process.name}: version {policy.version} of step {policy.step} has {updates} updates"
        self._observer.require(updates == policy.step, "an engine loads what was published", name)

    async def _generate(self, request: GenerationRequest) -> Generation:
        before = self.version
        await anyio.sleep(0.1 + 0.3 * self._draw.random())
        if is_selected(f"{self._seed}/poison/{request.cache_key}", self._mischief.poison_observation):
            self._process.crash()
            await anyio.sleep_forever()
        if self._draw.random() < self._mischief.engine_failed:
            self._observer.disturb_message("engine_failed", f"engine.engine.obs.{request.cache_key}")
            raise EngineFailed("out of memory")
        count = min(TOKENS, request.max_tokens)
        versions = _build_version_spans(before, self.version, self._draw.randrange(count + 1), count)
        return Generation(
            ids=compute_sampled_ids(request.ids, versions, request.seed),
            logprobs=[-1.0] * count,
            finish_reason="stop",
            versions=versions,
        )


class UnlearnableSampler(SimulatedSampler):
    """Of another policy: it tells no log-probabilities, has more tokens than the model that is trained, and no versions."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.version = 0

    async def _generate(self, request: GenerationRequest) -> Generation:
        self._observer.require(not request.trained, "another policy is never trained", request.cache_key)
        generation = await super()._generate(request)
        return msgspec.structs.replace(generation, logprobs=[math.nan] * len(generation.ids))


def _build_version_spans(before: int, after: int, swapped_at: int, count: int) -> tuple[VersionSpan, ...]:
    """Which version sampled which tokens when weights were swapped within a turn."""
    if before == after or swapped_at in (0, count):
        return (VersionSpan(version=before if swapped_at else after, start=0, stop=count),)
    return (VersionSpan(version=before, start=0, stop=swapped_at), VersionSpan(version=after, start=swapped_at, stop=count))
