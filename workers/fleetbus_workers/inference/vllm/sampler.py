"""`VllmSampler`: the event loop's side of a vLLM engine: requests, swaps of the weights between tokens, restarts.

What vLLM does not do is done here: weights are checked before it sees them (it loads half a file without a word), nothing is
sampled after a load that failed, keys and values are salted by load (its prefix cache outlives a swap), and an engine that
dies is started again with the weights that were last good, while the requests that it had wait and are sampled again.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from fleetbus_schemas import EngineLoad, PolicyPublished, VersionSpan, WeightsOffered
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, RequestRefused, list_distorting
from fleetbus_workers.inference.vllm import transfers
from fleetbus_workers.inference.vllm.engine import EngineSettings, is_gpu_available, start_engine, stop_engine
from fleetbus_workers.inference.vllm.load_recorder import LoadRecorder
from fleetbus_workers.inference.weight_folders import WeightFolders
from fleetbus_workers.weights.adapters import has_adapters
from fleetbus_workers.weights.file import MAX_HEADER_BYTES, WeightsRejected
from fleetbus_workers.weights.transfer import Fetch, TransferFailed

if TYPE_CHECKING:
    from fleetbus_workers.images.processing import ImageProcessor

MAX_ENGINE_DEATHS = 2
"""Engines that one request may outlive: one that killed them is left to the rule on poison."""

LOAD_SECONDS = 600.0
CALL_SECONDS = 30.0
SEED_MASK = (1 << 63) - 1

log = structlog.get_logger()


class VllmSampler:
    """`Sampler` for a model folder; its own weights count as version ``version``. Folders of versions are made in ``place``.
    With ``processor``, that of the folder, the model is shown images.

    Making one starts the engine and blocks; `close` ends it if `run` was never entered. Raises `UserError`.
    """

    def __init__(
        self, settings: EngineSettings, *, place: Path, version: int = 0, processor: ImageProcessor | None = None
    ) -> None:
        self.version = version
        self._processor = processor
        if processor is not None:
            from fleetbus_workers.inference.vllm.images import CACHE_GIB

            settings = msgspec.structs.replace(settings, options={"mm_processor_cache_gb": CACHE_GIB} | settings.options)
        self._weights = WeightFolders(settings.folder, place, untie=not is_gpu_available())
        self._settings = msgspec.structs.replace(settings, folder=self._weights.prepare_base())
        self._folder: Path | None = self._settings.folder
        """Of the version that is sampled from; None: it came from the learner, and no file of it was needed yet."""
        self._fetch_file: Callable[[], Awaitable[PolicyPublished]] | None = None
        self._loads = itertools.count(1)
        self._salt = "0"
        self._adapter: Any = None
        self._adapters_in_use: Counter[Path | None] = Counter()
        self._numbers = itertools.count()
        self._loading = anyio.Lock()
        self._died = anyio.Event()
        self._alive = anyio.Event()
        self._stats = dict.fromkeys(("prefill_tokens", "cached_tokens", "engine_restarts"), 0.0)
        self._recorder = LoadRecorder()
        self._engine: Any = start_engine(self._settings, self._recorder)

    @property
    def stats(self) -> dict[str, float]:
        """See `SamplerStats.stats`; also ``engine_restarts``."""
        return self._stats | {"sampled_tokens": self._recorder.sampled_tokens}

    @property
    def engine_load(self) -> EngineLoad:
        """See `LoadedSampler.engine_load`."""
        return self._recorder.engine_load

    def close(self) -> None:
        """End the engine and its processes; blocking."""
        engine, self._engine = self._engine, None
        if engine is not None:
            stop_engine(engine)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The engine's lifetime. If it dies and cannot be started again, the body is cancelled and the error raised."""
        try:
            await self._engine.update_weight_version(str(self.version))
            self._alive.set()
            async with anyio.create_task_group() as group:
                group.start_soon(self._restart_dead_engines)
                yield
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.close)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. A history without room below the longest length gets no token and finish reason ``length``.

        Raises `EngineFailed`, or `RequestRefused` for what vLLM can never do.
        """
        limit = min(request.max_tokens, self._settings.max_model_len - len(request.ids))
        if limit < 1:
            return Generation(ids=[], logprobs=[], finish_reason="length", versions=())
        if request.trained and (distorting := list_distorting(request.sampling)):
            raise RequestRefused(f"vllm reports log-probabilities after {', '.join(distorting)}: leave that out")
        for _ in range(MAX_ENGINE_DEATHS):
            await self._alive.wait()
            engine = self._engine
            try:
                return await self._sample(engine, request, limit)
            except _get_dead_error():
                self._mark_dead(engine)
        raise EngineFailed(f"the engine died {MAX_ENGINE_DEATHS} times with this request")

    @property
    def max_version_bytes(self) -> int:
        """No version of this model is larger: 8 bytes a number, and a header."""
        return 8 * self._weights.count_numbers() + MAX_HEADER_BYTES

    @property
    def receiving_processes(self) -> int:
        """See `fleetbus_workers.weights.transfer.ReceivesVersions`."""
        return self._settings.count_processes()

    async def load(self, policy: PolicyPublished) -> None:
        """Check a version, then swap to it between tokens; what turns in mid-generation have so far is computed again under
        the new weights. Raises `WeightsRejected`; the old version is back by then.

        Turns that wait in vLLM's queue carry the salt of their time: only an empty cache keeps them from the keys and values
        of the weights before, so the cache is emptied wholly, also of what is in use, unless it is to be kept.
        """
        self._expect_kind(policy)
        async with self._loading:
            folder = await anyio.to_thread.run_sync(self._weights.prepare, policy)
            await self._alive.wait()
            if self._settings.lora_rank:
                await self._add_adapter(self._engine, folder, policy)
            else:
                await self._replace_weights(self._engine, policy, "reload_checkpoint", str(folder))
            self.version, self._folder, self._fetch_file = policy.version, folder, None
            self._adapters_in_use = +self._adapters_in_use
            await anyio.to_thread.run_sync(self._weights.remove_others, folder, *self._adapters_in_use)

    async def receive_version(self, offered: WeightsOffered, seconds: float, given_up: threading.Event) -> None:
        """See `fleetbus_workers.weights.transfer.ReceivesVersions`."""
        if not self._alive.is_set():
            raise TransferFailed("the engine is being started")
        engine = self._engine
        try:
            await transfers.receive(engine, offered, limit_bytes=self.max_version_bytes, seconds=seconds, given_up=given_up)
        except TransferFailed:
            raise
        except Exception as error:  # vLLM raises errors of every kind
            if isinstance(error, _get_dead_error()):
                self._mark_dead(engine)
            raise TransferFailed(_format_error(error)) from error

    async def load_received(self, token: str, policy: PolicyPublished, fetch: Fetch) -> bool:
        """See `fleetbus_workers.weights.transfer.ReceivesVersions`. Otherwise as `load`."""
        self._expect_kind(policy)
        async with self._loading:
            await self._alive.wait()
            engine, head = self._engine, self._weights.check(policy)
            try:
                with anyio.fail_after(CALL_SECONDS):
                    difference = await transfers.find_difference(engine, token, policy)
            except Exception as error:  # noqa: BLE001 - vLLM raises errors of every kind
                if isinstance(error, _get_dead_error()):
                    self._mark_dead(engine)
                difference = _format_error(error)
            if difference:
                log.warning("transferred weights rejected; reading the file", version=policy.version, reason=difference)
                return False
            await self._replace_weights(engine, policy, "load_received", token, transfers.encode_manifest(policy), head)
            self.version, self._folder = policy.version, None
            self._fetch_file = partial(fetch, policy)
            await anyio.to_thread.run_sync(self._weights.remove_others)
            return True

    def forget(self, cache_key: str) -> None:
        """Nothing is kept by episode: the prefix cache forgets the longest unused."""

    async def _sample(self, engine: Any, request: GenerationRequest, limit: int) -> Generation:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        name = f"{request.cache_key}.{next(self._numbers)}"
        final = None
        adapter, version, folder = self._adapter, self.version, self._folder
        if adapter is not None:
            self._adapters_in_use[folder] += 1
        try:
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                max_tokens=limit,
                seed=request.seed & SEED_MASK,
                stop_token_ids=sorted(request.stop_ids),
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: object = TokensPrompt(prompt_token_ids=list(request.ids), cache_salt=self._salt)
            if request.images:
                prompt = await self._build_image_prompt(engine, request)
            async with aclosing(engine.generate(prompt, parameters, name, lora_request=adapter)) as outputs:
                async for output in outputs:
                    final = output
        except ValueError as error:  # what vLLM's checks of a request raise
            raise RequestRefused(f"vllm refuses this request: {_format_error(error)}") from error
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CALL_SECONDS, shield=True):
                await engine.abort(name)
            raise
        except (_get_dead_error(), RequestRefused):
            raise
        except Exception as error:  # vLLM raises errors of every kind
            raise EngineFailed(f"vllm failed this request: {_format_error(error)}") from error
        finally:
            if adapter is not None:
                self._adapters_in_use[folder] -= 1
        generation = self._build_generation(final)
        if adapter is None or not generation.ids:
            return generation
        return msgspec.structs.replace(generation, versions=(VersionSpan(version=version, start=0, stop=len(generation.ids)),))

    async def _build_image_prompt(self, engine: object, request: GenerationRequest) -> Any:
        if self._processor is None:
            raise RequestRefused("this engine was started without images, and its prompt has one")
        from fleetbus_workers.inference.vllm.images import build_image_prompt

        return await build_image_prompt(engine, request, self._salt, self._processor)

    def _build_generation(self, final: Any) -> Generation:
        chosen = final.outputs[0] if final is not None and final.outputs else None
        if chosen is None or chosen.finish_reason not in ("stop", "length"):
            raise EngineFailed(f"vllm ended this request with {getattr(chosen, 'finish_reason', None)!r}")
        ids = list(chosen.token_ids)
        logprobs = [float(places[token].logprob) for token, places in zip(ids, chosen.logprobs, strict=True)]
        if not all(math.isfinite(value) for value in logprobs):
            raise EngineFailed("vllm sampled a token with a log-probability that is not finite")
        cached = final.num_cached_tokens or 0
        self._stats["cached_tokens"] += cached
        self._stats["prefill_tokens"] += len(final.prompt_token_ids) - cached
        spans = [VersionSpan(version=int(span.version), start=span.start, stop=span.end) for span in chosen.weight_versions]
        return Generation(ids=ids, logprobs=logprobs, finish_reason=chosen.finish_reason, versions=_merge_spans(spans))

    # Weights

    def _expect_kind(self, policy: PolicyPublished) -> None:
        if has_adapters(entry.name for entry in policy.manifest) != bool(self._settings.lora_rank):
            held, taken = ("a whole model", "adapters") if self._settings.lora_rank else ("adapters", "whole models")
            raise WeightsRejected(
                f"{policy.uri} holds {held}, and this engine was started for {taken}: start the worker with the learner's "
                "trainer.published_weights and trainer.lora_rank"
            )

    async def _find_folder(self) -> Path:
        """The folder of the version that is sampled from. Raises `WeightsRejected` if its file is gone."""
        if self._folder is None:
            assert self._fetch_file is not None
            self._folder = await anyio.to_thread.run_sync(self._weights.prepare, await self._fetch_file())
        return self._folder

    async def _replace_weights(self, engine: object, policy: PolicyPublished, method: str, *arguments: object) -> None:
        try:
            await self._swap(engine, policy.version, method, *arguments)
        except Exception as error:  # vLLM raises errors of every kind
            await self._restore_weights(engine)
            raise WeightsRejected(f"{policy.uri}: vllm did not load it: {_format_error(error)}") from error

    async def _add_adapter(self, engine: Any, folder: Path, policy: PolicyPublished) -> None:
        """Have further turns sampled with the adapters in ``folder``; those that run end with the ones that they began with."""
        from vllm.lora.request import LoRARequest

        number = next(self._loads)
        adapter = LoRARequest(f"{policy.version}.{number}", number, str(folder))
        try:
            with anyio.fail_after(LOAD_SECONDS):
                await engine.add_lora(adapter)
        except Exception as error:  # vLLM raises errors of every kind
            if isinstance(error, _get_dead_error()):
                self._mark_dead(engine)
                await self._alive.wait()
            raise WeightsRejected(f"{policy.uri}: vllm did not load it: {_format_error(error)}") from error
        self._adapter = adapter

    async def _swap(self, engine: Any, version: int, method: str, *arguments: object) -> None:
        """Pause, load by a method of `worker_extension`, label, continue."""
        try:
            with anyio.fail_after(LOAD_SECONDS):
                await engine.pause_generation(mode="keep", clear_cache=False)
                await engine.collective_rpc(method, args=arguments)
                self._salt = str(next(self._loads))
                if not self._settings.keeps_cache and not await engine.reset_prefix_cache(reset_running_requests=True):
                    raise EngineFailed("vllm did not give up the keys and values of its old weights")
                if self._processor is not None:
                    await engine.reset_encoder_cache()
                await engine.update_weight_version(str(version))
        except BaseException:
            with anyio.move_on_after(CALL_SECONDS, shield=True), suppress(_get_dead_error()):
                await engine.pause_generation(mode="keep", clear_cache=False)
            raise
        await engine.resume_generation()

    async def _restore_weights(self, engine: object) -> None:
        """After a failed load nothing is sampled before good weights are in: the old ones, or a restarted engine."""
        try:
            await self._swap(engine, self.version, "reload_checkpoint", str(await self._find_folder()))
        except Exception as error:  # noqa: BLE001 - vLLM raises errors of every kind
            log.error("engine refuses its previous weights; restarting it", reason=_format_error(error))
            self._mark_dead(engine)
            await self._alive.wait()

    # Restarts

    def _mark_dead(self, engine: object) -> None:
        """Have a dead engine restarted unless that is under way; further requests wait."""
        if engine is self._engine and self._alive.is_set():
            self._alive = anyio.Event()
            self._died.set()

    async def _restart_dead_engines(self) -> None:
        while True:
            await self._died.wait()
            self._died = anyio.Event()
            log.warning("engine died; restarting it")
            dead, self._engine = self._engine, None
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(stop_engine, dead)
                self._engine = await anyio.to_thread.run_sync(start_engine, self._settings, self._recorder)
            if self._adapter is None and (folder := await self._find_folder()) != self._settings.folder:
                await self._engine.collective_rpc("reload_checkpoint", args=(str(folder),))
            self._salt = str(next(self._loads))
            await self._engine.update_weight_version(str(self.version))
            self._stats["engine_restarts"] += 1
            self._alive.set()


def _get_dead_error() -> type[Exception]:
    from vllm.v1.engine.exceptions import EngineDeadError

    found: type[Exception] = EngineDeadError
    return found


def _merge_spans(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbouring spans of one version as one: a load that failed and was undone leaves two."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = msgspec.structs.replace(merged[-1], stop=span.stop)
        else:
            merged.append(span)
    return tuple(merged)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
