"""`OpenAISampler`: one policy on one or more HTTP servers, behind the same protocol as an engine in process.

An answer is never lost with its server: the tokens that were streamed so far are kept, and the next server, or the same one
under new weights, continues after them. So every token is known with the version that sampled it, on any server.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
import structlog

from fleetbus.errors import UserError
from fleetbus_schemas import EngineLoad, PolicyPublished
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, RequestRefused, list_distorting
from fleetbus_workers.inference.openai.capability_probe import probe
from fleetbus_workers.inference.openai.dialects import NOT_STANDARD, ServerCall
from fleetbus_workers.inference.openai.model_server import ModelServer, ServerFailed, merge_loads
from fleetbus_workers.inference.openai.partial_generation import PartialGeneration
from fleetbus_workers.inference.openai.pool import ServerPool, build_weight_label
from fleetbus_workers.inference.weight_folders import WeightFolders
from fleetbus_workers.weights.adapters import has_adapters
from fleetbus_workers.weights.file import WeightsRejected

MAX_TRIES = 4
"""Servers that may fail one turn before it counts as failed: more, and a turn that kills servers would kill them all."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

log = structlog.get_logger()


class Codec(Protocol):
    """The tokenizer's side of a server that speaks text; ``turn_end`` is the id that ends an assistant's turn."""

    @property
    def turn_end(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class OpenAISampler:
    """`Sampler` for servers at ``urls``; their weights count as version ``version`` until others are loaded.

    ``purpose`` ``train`` wants token ids, log-probabilities and servers that load new weights from ``place``, a folder
    that
    they read too; ``evaluate`` takes what there is. `run` raises `UserError` when a server cannot serve the purpose or
    when none answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        codec: Codec,
        prompt: Sequence[int],
        purpose: str = "train",
        model: str = "",
        key: str = "",
        slots: int = 64,
        max_model_len: int = 1 << 30,
        weights: WeightFolders | None = None,
        version: int = 0,
        max_tries: int = MAX_TRIES,
    ) -> None:
        if not urls:
            raise UserError("the engine openai needs inference.urls: base URLs of servers, separated by commas")
        self.version = version
        self._codec = codec
        self._prompt = list(prompt)
        self._purpose = purpose
        self._max_model_len = max_model_len
        self._probed = False
        self._model = model
        self._weights = weights
        self._max_tries = max_tries
        servers = [ModelServer(url, key=key, connections=slots) for url in dict.fromkeys(urls)]
        self._pool = ServerPool(servers, slots=slots, restore=self._restore_server)
        self._folder: Path | None = None
        self._accepting = anyio.Event()
        self._accepting.set()
        self._loading = anyio.Lock()
        self._streams: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()
        self._limiter = anyio.Semaphore(slots)
        self._stats = dict.fromkeys(("sampled_tokens", "prefill_tokens", "cached_tokens", "failovers", "interruptions"), 0.0)

    @property
    def stats(self) -> dict[str, float]:
        """See `SamplerStats.stats`; also ``failovers``, ``interruptions`` (by new weights), ``turns_stayed``,
        ``turns_moved``."""
        return self._stats | {"turns_stayed": float(self._pool.sticky_turns), "turns_moved": float(self._pool.moved_turns)}

    @property
    def engine_load(self) -> EngineLoad:
        """See `LoadedSampler.engine_load`; of the servers that are ready."""
        return merge_loads(server.state.load for server in self._pool.list_ready())

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Ask every server what it can do, then watch their health until the end; connections are closed on leaving."""
        try:
            await self.probe()
            async with anyio.create_task_group() as group:
                group.start_soon(self._pool.watch, self._loading)
                yield
                group.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(5, shield=True):
                for server in self._pool.servers:
                    await server.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn on whichever server is best; cancelling ends it there too. A history without room below
        ``max_model_len`` gets no token and finish reason ``length``. Raises `EngineFailed` after
        ``max_tries`` failures, `RequestRefused` for what a server will never do."""
        limit = min(request.max_tokens, self._max_model_len - len(request.ids))
        if limit < 1:
            return Generation(ids=[], logprobs=[], finish_reason="length", versions=())
        request = msgspec.structs.replace(request, max_tokens=limit)
        async with self._limiter:
            answer = PartialGeneration(request)
            failures = 0
            while not answer.is_finished:
                server = await self._select_server(request)
                try:
                    await self._stream_answer(answer, server)
                except ServerFailed as failed:
                    failures += 1
                    self._stats["failovers"] += 1
                    self._pool.mark_suspect(server, str(failed))
                    if failures >= self._max_tries:
                        raise EngineFailed(f"{failures} servers failed this turn, last: {failed}") from failed
                    await anyio.sleep(min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))
            self._stats["sampled_tokens"] += len(answer.ids)
            return answer.build_generation()

    async def load(self, policy: PolicyPublished) -> None:
        """Interrupt what is being streamed, swap every server, let it continue. Raises `WeightsRejected`; then the old version
        answers on, on the servers that could be given it back."""
        if self._weights is None:
            self._relabel(policy)
            return
        async with self._loading:
            if has_adapters(entry.name for entry in policy.manifest):
                raise WeightsRejected(f"{policy.uri}: adapters alone: set trainer.published_weights = merged for servers")
            folder = await anyio.to_thread.run_sync(self._weights.prepare, policy)
            self._accepting = anyio.Event()
            try:
                await self._interrupt()
                await self._swap(policy.version, folder)
            finally:
                self._accepting.set()
                self._pool.notify()
            await anyio.to_thread.run_sync(self._weights.remove_others, self._folder)

    def forget(self, cache_key: str) -> None:
        self._pool.forget(cache_key)

    # Requests

    async def _select_server(self, request: GenerationRequest) -> ModelServer:
        while True:
            await self._accepting.wait()
            server = await self._pool.choose(request.cache_key)
            if self._accepting.is_set():  # nothing was awaited since a server was chosen
                self._check_request(server, request)
                return server

    def _check_request(self, server: ModelServer, request: GenerationRequest) -> None:
        """Refuse what this server can never do for this request."""
        if server.dialect.name == "standard" and (unknown := list_distorting(request.sampling, NOT_STANDARD)):
            raise RequestRefused(f"{server.url} takes nothing beyond the OpenAI protocol: {', '.join(unknown)} cannot be set")
        if not request.trained:
            return
        if self._purpose != "train" or not server.dialect.returns_tokens:
            raise RequestRefused(f"{server.url} serves evaluation only: nothing can be trained on what it answers")
        temperature, distorting = request.sampling.temperature, list_distorting(request.sampling)
        if temperature not in (0.0, 1.0) and not server.state.scaled_logprobs:
            raise RequestRefused(
                f"{server.url} reports log-probabilities before the temperature {temperature:g}: "
                "start it with --logprobs-mode processed_logprobs, or set episode.temperature = 1"
            )
        if distorting and server.state.scaled_logprobs:
            raise RequestRefused(
                f"{server.url} reports log-probabilities after {', '.join(distorting)}: leave that out, or start it without "
                "--logprobs-mode processed_logprobs"
            )

    async def _stream_answer(self, answer: PartialGeneration, server: ModelServer) -> None:
        """Stream from a server until the answer is finished or new weights interrupt it."""
        version = server.state.version if server.state.version is not None else self.version
        call = ServerCall(
            request=answer.request,
            model=server.state.model,
            generated_ids=tuple(answer.ids),
            prompt_text="" if server.dialect.returns_tokens else self._codec.decode([*answer.request.ids, *answer.ids]),
            stops=()
            if server.dialect.returns_tokens
            else [self._codec.decode([stop]) for stop in sorted(answer.request.stop_ids)],
            salt=build_weight_label(version),
        )
        scope = anyio.CancelScope()
        self._streams.add(scope)
        server.state.in_flight += 1
        try:
            with scope:
                await self._read_chunks(answer, server, call, version)
            self._stats["interruptions"] += scope.cancelled_caught
        finally:
            server.state.in_flight -= 1
            self._streams.discard(scope)
            if not self._streams:
                self._idle.set()

    async def _read_chunks(self, answer: PartialGeneration, server: ModelServer, call: ServerCall, version: int) -> None:
        """Take pieces as they come; what other weights than the expected ones made is given back."""
        text, known, cached = "", len(answer.ids), 0
        async with aclosing(server.stream(call, answer.request.cache_key)) as pieces:
            async for piece in pieces:
                cached += piece.cached_tokens
                if self._pool.wanted is not None and any(found != build_weight_label(version) for found in piece.labels):
                    answer.truncate(known)
                    server.state.version = None
                    raise ServerFailed(
                        f"{server.url}: its weights are {', '.join(piece.labels)}, not {build_weight_label(version)}"
                    )
                if server.dialect.returns_tokens:
                    answer.append_chunk(piece, version)
                text += piece.text
                if piece.finish and not server.dialect.returns_tokens:
                    answer.set_text(self._codec.encode(text), self._codec.turn_end, piece.finish, version)
        self._stats["cached_tokens"] += cached
        self._stats["prefill_tokens"] += len(call.request.ids) + len(call.generated_ids) - cached

    # Probing

    async def probe(self) -> None:
        """Ask every server what it can do, once. Raises `UserError` when one cannot serve the purpose or when none answers."""
        if self._probed:
            return
        async with anyio.create_task_group() as group:
            for server in self._pool.servers:
                group.start_soon(self._probe, server)
        if not self._pool.list_ready():
            raise UserError(f"no server answers: {self._pool.describe_failures()}")
        for server in self._pool.servers:
            if server.state.healthy:
                self._check_purpose(server)
        self._probed = True

    async def _probe(self, server: ModelServer) -> None:
        try:
            await probe(server, model=self._model, ids=self._prompt, text=self._codec.decode(self._prompt))
        except ServerFailed as failed:
            self._pool.mark_suspect(server, str(failed))
        else:
            server.state.healthy = True
            server.state.version = self.version
            if server.dialect.name == "standard":
                log.warning(
                    "server takes only settings of the OpenAI protocol; its own top-k, min-p and repetition penalty hold",
                    url=server.url,
                )
            log.info("server probed", url=server.url, dialect=server.dialect.name, model=server.state.model)

    def _check_purpose(self, server: ModelServer) -> None:
        if self._purpose != "train":
            return
        if not server.dialect.returns_tokens:
            raise UserError(
                f"{server.url} returns text only, and training needs token ids and log-probabilities: "
                "use it with --inference-purpose evaluate, or a server with return_token_ids (vLLM)"
            )
        if not server.state.takes_weights:
            raise UserError(
                f"{server.url} does not accept new weights: start vLLM with VLLM_SERVER_DEV_MODE=1, or use it with "
                "--inference-purpose evaluate"
            )

    # Weights

    def _relabel(self, policy: PolicyPublished) -> None:
        """Servers whose weights are fixed stand for the untrained policy, with any number."""
        if policy.step:
            raise WeightsRejected(f"version {policy.version} is trained, and these servers take no new weights")
        self.version = policy.version
        for server in self._pool.servers:
            server.state.version = policy.version

    async def _interrupt(self) -> None:
        """End every stream; each answer keeps its tokens and waits for `_accepting`."""
        while self._streams:
            self._idle = anyio.Event()
            for scope in self._streams:
                scope.cancel()
            await self._idle.wait()

    async def _swap(self, version: int, folder: Path) -> None:
        before = (self._folder, self.version)
        self._folder, self._pool.wanted = folder, version
        async with anyio.create_task_group() as group:
            for server in self._pool.servers:
                group.start_soon(self._fetch_or_mark_suspect, server)
        if self._pool.list_ready():
            self.version = version
            return
        reasons = self._pool.describe_failures()
        self._folder, self._pool.wanted = before
        if self._folder is not None:  # a failed load leaves a mixture behind: nothing is sampled before good weights are in
            async with anyio.create_task_group() as group:
                for server in self._pool.servers:
                    group.start_soon(self._fetch_or_mark_suspect, server)
        raise WeightsRejected(f"no server loaded version {version}: {reasons}")

    async def _fetch_or_mark_suspect(self, server: ModelServer) -> None:
        """The wanted weights for one server that lives; one that fails is left to the watch."""
        if server.state.dialect is None:
            return
        try:
            await self._fetch_weights(server)
        except ServerFailed as failed:
            self._pool.mark_suspect(server, str(failed))
        else:
            server.state.healthy = True

    async def _fetch_weights(self, server: ModelServer) -> None:
        wanted = self._pool.wanted
        server.state.version = None
        if self._folder is not None and wanted is not None:
            await server.load_weights(self._folder, build_weight_label(wanted))
        server.state.version = wanted if wanted is not None else self.version

    async def _restore_server(self, server: ModelServer) -> None:
        """A server that was away: what it can do may have changed, its weights surely did."""
        await probe(server, model=self._model, ids=self._prompt, text=self._codec.decode(self._prompt))
        try:
            self._check_purpose(server)
        except UserError as error:
            raise ServerFailed(str(error)) from error
        await self._fetch_weights(server)
