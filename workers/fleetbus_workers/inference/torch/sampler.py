"""`TorchSampler`: the embedded engine, for any causal language model folder, on a CPU by default.

This file is the event loop's side: it validates what comes in, waits without blocking, and owns the lifetime of the engine's
thread. Nothing of torch runs on the event loop.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fleetbus.concurrency.task_groups import open_flat_task_group
from fleetbus.concurrency.wakeup import ThreadWakeup
from fleetbus.errors import UserError
from fleetbus_schemas import EngineLoad, PolicyPublished
from fleetbus_workers.freed_memory import return_freed_memory
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, RequestRefused, list_distorting
from fleetbus_workers.inference.torch.batch import Runner
from fleetbus_workers.inference.torch.engine import Engine
from fleetbus_workers.inference.torch.fused_decoder import build_fused_runner
from fleetbus_workers.inference.torch.generic import GenericRunner
from fleetbus_workers.inference.torch.kv_cache import PrefixCache
from fleetbus_workers.inference.torch.sampling import PENALTIES
from fleetbus_workers.inference.torch.turn import EngineOperation, Turn, WeightSwap
from fleetbus_workers.weights.adapters import complete_version, read_version
from fleetbus_workers.weights.file import MAX_HEADER_BYTES, WeightsRejected, check_names
from fleetbus_workers.weights.names import convert_to_memory, has_other_names

if TYPE_CHECKING:
    from fleetbus_workers.images.processing import ImageProcessor
    from fleetbus_workers.inference.torch.vision import ImageEncoder

SWITCH_SECONDS = 0.0001
"""How long a busy event loop keeps the interpreter lock from the engine's thread. With Python's 5 ms, an engine that needs the
lock for microseconds, many times per token, loses a quarter of its tokens per second to a loop that needs 2.5 ms per turn."""


class TorchSampler:
    """`Sampler` for a folder that transformers' ``from_pretrained`` loads; its own weights count as version ``version``.

    ``slots`` turns are sampled at once and ``max_waiting`` more may wait; histories end at ``max_model_len`` tokens, or where
    the
    model's positions end, with finish reason ``length``. Keys and values of ``cached_histories`` episodes and
    ``cached_prompts``
    prompts are kept between turns, in at most ``cache_bytes`` and a quarter of it. ``fused`` False forces transformers' own
    forward call. With ``processor``, that of the folder, the model is shown images. Raises `UserError` if the folder
    holds no
    model that can run here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 32,
        max_model_len: int = 2048,
        threads: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        cached_histories: int = 512,
        cached_prompts: int = 16,
        cache_bytes: int = 1 << 30,
        max_waiting: int = 1024,
        fused: bool = True,
        version: int = 0,
        processor: ImageProcessor | None = None,
    ) -> None:
        self.version = version
        self.slots = slots
        self._threads = threads
        if processor is not None:
            from fleetbus_workers.inference.torch import vision

            model = vision.open_model(folder, device, dtype, processor)
            self._max_model_len = min(max_model_len, _read_max_positions(model, max_model_len))
            self._runner: Runner = vision.VisionRunner(model, slots=slots, max_model_len=self._max_model_len)
            self._image_encoder: ImageEncoder | None = vision.ImageEncoder(processor)
        else:
            model = _open_model(folder, device, dtype)
            self._max_model_len = min(max_model_len, _read_max_positions(model, max_model_len))
            self._runner, self._image_encoder = _runner(model, slots, self._max_model_len, fused), None
        self._model = model
        self._folder = folder
        self._prefix_cache = PrefixCache(histories=cached_histories, prompts=cached_prompts, limit_bytes=cache_bytes)
        self._engine: Engine | None = None
        self._room = anyio.Semaphore(slots + max_waiting)
        self._loading = anyio.Lock()
        counted = ("sampled_tokens", "computed_tokens", "prefill_tokens", "cached_tokens", "busy_seconds")
        self._stats = dict.fromkeys(counted, 0.0)

    @property
    def stats(self) -> dict[str, float]:
        """Totals that only grow: tokens sampled, and steps of rows that it took, of which several turns may have shared one;
        prompt tokens computed, prompt tokens found cached, seconds of computing."""
        return dict(self._stats)

    @property
    def engine_load(self) -> EngineLoad:
        """See `LoadedSampler.engine_load`."""
        running, waiting = self._engine.count_requests() if self._engine is not None else (0, 0)
        return EngineLoad(running=running, waiting=waiting)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifetime of the engine's thread. Leaving stops it within one token; if it fails, the body is cancelled and
        `EngineFailed` raised. May be entered again afterwards."""
        wakeup = ThreadWakeup()
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, switch_seconds))
        engine = Engine(
            self._runner, self._prefix_cache, self._stats, version=self.version, threads=self._threads, notify=wakeup.notify
        )
        try:
            async with open_flat_task_group() as tasks:
                tasks.start_soon(_run_engine, engine)
                tasks.start_soon(self._deliver_results, engine, wakeup)
                self._engine = engine
                try:
                    yield
                finally:
                    self._engine = None
                    engine.stop()
                    tasks.cancel_scope.cancel()
        finally:
            sys.setswitchinterval(switch_seconds)
            engine.fail_all("the engine was stopped")
            self._complete_operations(engine)
            wakeup.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. A history that leaves no room below ``max_model_len`` gets no token and finish reason ``length``.

        Cancelling frees its place at the next token. Raises `EngineFailed`, or `RequestRefused` for
        settings that it does not have.
        """
        if unknown := list_distorting(request.sampling, PENALTIES):
            raise RequestRefused(f"the engine torch has no such setting: {', '.join(unknown)}")
        turn = Turn(request, self._max_model_len)
        if request.images:
            await self._encode_images(turn)
        self._check_ids(turn)
        if turn.limit < 1:
            return Generation(ids=[], logprobs=[], finish_reason="length", versions=())
        async with self._room:
            try:
                await self._submit_and_wait(turn)
            finally:
                turn.abandoned = True
        assert turn.generation is not None
        return turn.generation

    async def load(self, policy: PolicyPublished) -> None:
        """Read and validate a published version in a worker thread, then swap to it between tokens.

        Turns in mid-generation continue with the keys and values that they have; later turns are computed wholly under the new
        version. Raises `WeightsRejected`, after which nothing has changed, or `EngineFailed`.
        """
        await self._load(policy, lambda: read_version(policy, self._folder))

    async def load_tensors(self, policy: PolicyPublished, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `load`, with tensors that were compared with the manifest already."""
        await self._load(policy, lambda: complete_version(policy, tensors, self._folder))

    @property
    def max_version_bytes(self) -> int:
        """No version of this model is larger: 8 bytes a number, and a header."""
        return 8 * sum(math.prod(shape) for shape in self._runner.shapes.values()) + MAX_HEADER_BYTES

    async def _load(self, policy: PolicyPublished, read: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        async with self._loading:
            prepared = await anyio.to_thread.run_sync(lambda: self._prepare(policy.uri, read()))
            await self._submit_and_wait(WeightSwap(policy.version, prepared))
            await anyio.to_thread.run_sync(return_freed_memory)  # of the version before, and of its histories

    def forget(self, cache_key: str) -> None:
        self._prefix_cache.forget(cache_key)

    async def _submit_and_wait(self, operation: EngineOperation) -> None:
        if self._engine is None:
            raise EngineFailed("the engine is not running")
        self._engine.submit(operation)
        await operation.done.wait()
        if operation.failure is not None:
            raise EngineFailed(operation.failure)

    async def _encode_images(self, turn: Turn) -> None:
        """Code the images of a turn into its ids. Raises `RequestRefused`."""
        if self._image_encoder is None:
            raise RequestRefused("this model reads text only, and its prompt has an image")
        turn.ids, turn.images = await self._image_encoder.encode_images(turn.ids, turn.request.images)

    def _check_ids(self, turn: Turn) -> None:
        """Ids that the model does not have would fail the step of all sequences."""
        if not len(turn.ids) or min(turn.request.ids) < 0 or turn.ids[-1] < 0 or turn.ids.max() >= self._runner.vocabulary:
            raise EngineFailed(f"a history must be of ids below {self._runner.vocabulary}, and not empty")

    def _prepare(self, what: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        shapes = self._runner.shapes
        if has_other_names(self._model) and tensors.keys() != shapes.keys():
            tensors = convert_to_memory(self._model, tensors)
        check_names(what, set(tensors), set(shapes))
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise WeightsRejected(f"{what}: {name} has shape {list(tensor.shape)}, the model {list(shapes[name])}")
        return self._runner.prepare(tensors)

    async def _deliver_results(self, engine: Engine, wakeup: ThreadWakeup) -> None:
        while True:
            await wakeup.wait()
            self._complete_operations(engine)

    def _complete_operations(self, engine: Engine) -> None:
        while engine.completed:
            operation = engine.completed.popleft()
            if isinstance(operation, WeightSwap) and operation.failure is None:
                self.version = operation.version
            operation.done.set()


async def _run_engine(engine: Engine) -> None:
    try:
        await anyio.to_thread.run_sync(engine.run, limiter=anyio.CapacityLimiter(1))
    except Exception as error:  # supervised: the sampler restarts what failed
        raise EngineFailed(f"{type(error).__name__}: {error}") from error


def _open_model(folder: Path, device: str, dtype: torch.dtype) -> Any:
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        if has_vision(folder):
            raise UserError(f"{folder} contains an image-text model: set environment.images = true to train it") from error
        raise UserError(f"{folder}: no causal language model can be loaded: {str(error).splitlines()[0]}") from error
    return model.to(device).eval().requires_grad_(False)


def _read_max_positions(model: Any, default: int) -> int:
    positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or default
    return positions


def _runner(model: Any, slots: int, max_model_len: int, fused: bool) -> Runner:
    runner = build_fused_runner(model, slots=slots, max_model_len=max_model_len) if fused else None
    return runner or GenericRunner(model, slots=slots, max_model_len=max_model_len)
