"""`TinkerSampler`: sampling through a Tinker service by its official SDK. Weights stay there: a version is a path on it.

Stop ids are always sent, because a service need not stop at the end of a turn by itself. Its log-probabilities are those before
the temperature, so what is trained has to be sampled at temperature 1.
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from fleetbus.config.settings import TinkerSettings
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished, VersionSpan
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, RequestRefused, list_distorting
from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.weight_folders import parse_file_uri
from fleetbus_workers.tinker_service import SamplerPath, format_error, open_service_client
from fleetbus_workers.weights.file import WeightsRejected

SEED_MASK = (1 << 31) - 1
UNKNOWN_SETTINGS = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
OPEN_SECONDS = 120.0
LOAD_SECONDS = 600.0


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator["TinkerSampler"]:
    """See `fleetbus_workers.inference.engine_context`. The service was reached."""
    settings = context.configuration.inference
    sampler = TinkerSampler(context.configuration.tinker, max_model_len=settings.max_model_len, slots=settings.max_num_seqs)
    await sampler.open()
    yield sampler


class TinkerSampler:
    """`Sampler` whose weights are on a Tinker service; nothing is sampled before a version is loaded."""

    def __init__(self, settings: TinkerSettings, *, max_model_len: int = 2048, slots: int = 32) -> None:
        self.version = -1
        self._settings = settings
        self._max_model_len = max_model_len
        self._service: Any = None
        self._client: Any = None
        self._room = anyio.Semaphore(slots)
        self._loading = anyio.Lock()
        self._stats = dict.fromkeys(("sampled_tokens", "prefill_tokens", "cached_tokens"), 0.0)

    @property
    def stats(self) -> dict[str, float]:
        """See `SamplerStats.stats`."""
        return dict(self._stats)

    async def open(self) -> None:
        """Reach the service. Raises `UserError`."""
        if self._service is None:
            try:
                with anyio.fail_after(OPEN_SECONDS):
                    self._service = await anyio.to_thread.run_sync(
                        partial(open_service_client, self._settings), abandon_on_cancel=True
                    )
            except TimeoutError:
                raise UserError(f"the Tinker service {self._settings.url} did not answer in {OPEN_SECONDS:.0f} s") from None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Between entering and leaving, turns can be sampled."""
        await self.open()
        try:
            yield
        finally:
            self._client = self._service = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn, wholly under the version that is loaded when it begins. Raises `EngineFailed` or
        `RequestRefused`."""
        import tinker

        limit = min(request.max_tokens, self._max_model_len - len(request.ids))
        if limit < 1:
            return Generation(ids=[], logprobs=[], finish_reason="length", versions=())
        sampling = request.sampling
        if request.trained and sampling.temperature not in (0.0, 1.0):
            raise RequestRefused(
                "a Tinker service reports log-probabilities before the temperature: set episode.temperature = 1"
            )
        if unknown := list_distorting(sampling, UNKNOWN_SETTINGS):
            raise RequestRefused(f"a Tinker service has no such setting: {', '.join(unknown)}")
        if request.trained and (distorting := list_distorting(sampling)):
            raise RequestRefused(f"{', '.join(distorting)} samples from another distribution than the one that is trained")
        parameters = tinker.SamplingParams(
            max_tokens=limit,
            seed=request.seed & SEED_MASK,
            stop=sorted(request.stop_ids),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
        )
        async with self._room:
            version, client = self.version, self._client
            if client is None:
                raise EngineFailed("no version is loaded")
            try:
                prompt = tinker.ModelInput.from_ints(list(request.ids))
                response = await client.sample_async(prompt=prompt, num_samples=1, sampling_params=parameters)
            except (tinker.BadRequestError, tinker.UnprocessableEntityError, ValueError) as error:
                raise RequestRefused(f"the Tinker service refuses this request: {format_error(error)}") from error
            except tinker.TinkerError as error:
                raise EngineFailed(f"the Tinker service failed this request: {format_error(error)}") from error
        return self._build_generation(request, response, version)

    def _build_generation(self, request: GenerationRequest, response: Any, version: int) -> Generation:
        sequence = response.sequences[0] if response.sequences else None
        ids = list(sequence.tokens) if sequence is not None else []
        logprobs = list(sequence.logprobs or ()) if sequence is not None else []
        if not ids or len(ids) != len(logprobs) or not all(math.isfinite(value) for value in logprobs):
            raise EngineFailed(f"the Tinker service answered {len(ids)} tokens with {len(logprobs)} log-probabilities")
        cached = getattr(response, "prompt_cache_hit_tokens", 0) or 0
        self._stats["sampled_tokens"] += len(ids)
        self._stats["cached_tokens"] += cached
        self._stats["prefill_tokens"] += len(request.ids) - cached
        return Generation(
            ids=ids,
            logprobs=logprobs,
            finish_reason="stop" if ids[-1] in request.stop_ids else "length",
            versions=(VersionSpan(version=version, start=0, stop=len(ids)),),
        )

    async def load(self, policy: PolicyPublished) -> None:
        """Sample from a published path from now on; turns in mid-generation end under the version that they began with.
        Raises `WeightsRejected`."""
        import tinker

        async with self._loading:
            try:
                content = await anyio.Path(parse_file_uri(policy.uri)).read_bytes()
                path = msgspec.json.decode(content, type=SamplerPath).sampler
            except (OSError, *UNREADABLE) as error:
                raise WeightsRejected(
                    f"{policy.uri} is not a version of a Tinker service ({format_error(error)}): set learner.trainer = tinker"
                ) from error
            try:
                with anyio.fail_after(LOAD_SECONDS):
                    client = await self._service.create_sampling_client_async(model_path=path)
            except (tinker.TinkerError, ValueError, TimeoutError) as error:
                raise WeightsRejected(f"the Tinker service does not sample from {path}: {format_error(error)}") from error
            self.version, self._client = policy.version, client

    def forget(self, cache_key: str) -> None:
        """Nothing is kept here."""
