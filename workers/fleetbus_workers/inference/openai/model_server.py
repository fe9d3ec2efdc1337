"""One HTTP server: its dialect, its health, the version of its weights, and one turn streamed from it.

Below is httpx. What goes wrong is sorted here: `ServerFailed` may pass, here or elsewhere; `RequestRefused` never will.
"""

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec

from fleetbus.errors import UserError
from fleetbus.logs.secret_formats import REDACTED
from fleetbus_schemas import EngineLoad
from fleetbus_workers.inference.base import RequestRefused
from fleetbus_workers.inference.openai.dialects import Dialect, MalformedResponse, ServerCall, StreamChunk, format_error
from fleetbus_workers.serving.bounded_http import bound

MAX_CHARS = 4 << 20
MAX_COUNT = 1 << 53
"""Of anything: a server that says more, in one line or in many, cannot make a heartbeat that no encoder takes."""

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_use",
    "vllm:num_preemptions_total": "preemptions",
}


def parse_urls(text: str) -> list[str]:
    """The addresses of servers in ``inference.urls``, without ``/v1``. Raises `UserError`."""
    urls = [url.strip() for url in text.split(",") if url.strip()]
    if any(not url.startswith(("http://", "https://")) for url in urls):
        raise UserError("inference.urls must be base URLs such as http://host:8000, separated by commas")
    return [url.rstrip("/").removesuffix("/v1") for url in urls]


def parse_load(text: str) -> EngineLoad:
    """Parse the load that the text reports, None where it reports nothing; values that cannot be are left out."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for line in text[:MAX_CHARS].splitlines():
        if (name := _NAMES.get(line.partition("{")[0].partition(" ")[0])) is not None:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            if 0 <= value <= MAX_COUNT:
                found[name].append(value)
    return merge_loads(
        EngineLoad(**{name: value if name == "kv_cache_use" else int(value)})  # type: ignore[arg-type]
        for name, values in found.items()
        for value in values
    )


def merge_loads(loads: Iterable[EngineLoad]) -> EngineLoad:
    """Several engines as one: requests added, of the use of the cache the largest."""
    running = waiting = preemptions = None
    use: float | None = None
    for load in loads:
        running, waiting = _add(running, load.running), _add(waiting, load.waiting)
        preemptions = _add(preemptions, load.preemptions)
        use = max((each for each in (use, load.kv_cache_use) if each is not None), default=None)
    return EngineLoad(running=running, waiting=waiting, kv_cache_use=use, preemptions=preemptions)


def _add(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left + right, MAX_COUNT)


MAX_ANSWER_BYTES = 64 << 20
MAX_ANSWER_VALUES = 1 << 22
"""Of one answer, or one event of a stream: log-probabilities of a long completion."""

MAX_ERROR_BYTES = 1 << 16
"""Read of an error, as UTF-8: the server names the encoding, and some that Python has are no text's."""

SERVER_KEY = "OPENAI_API_KEY"
"""Environment variable with the servers' key; it is never written anywhere."""

CONNECT_SECONDS = 5.0
STALL_SECONDS = 120.0
"""Longest silence within an answer: a long prompt in a long queue."""

CONTROL_SECONDS = 300.0
"""For loading new weights; large ones take minutes from a slow disk."""

RESUME_SECONDS = 30.0
"""For letting a server continue, even if all else is ended."""

HEALTH_SECONDS = 5.0
METRICS_SECONDS = 1.0

REFUSED = frozenset({400, 404, 405, 413, 422})
"""Statuses that a repetition would meet again; 401 and 403 are the operator's to mend, all else may pass."""


class ServerFailed(Exception):
    """This server did not answer as it should; another one, or it later, may."""


class ServerState(msgspec.Struct, kw_only=True):
    """The state of a server. ``version`` is the policy version of its weights, None if unknown."""

    dialect: Dialect | None = None
    model: str = ""
    healthy: bool = False
    takes_weights: bool = False
    scaled_logprobs: bool = False
    """Its log-probabilities are those at the sampling temperature."""
    version: int | None = None
    in_flight: int = 0
    load: EngineLoad = EngineLoad()
    reason: str = "not asked yet"


class ModelServer:
    """One base URL. ``key`` is sent as a bearer token and never logged."""

    def __init__(self, url: str, *, key: str = "", connections: int = 64) -> None:
        self.url = url.rstrip("/")
        self.state = ServerState()
        self._key = key.strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections),
            trust_env=False,
            event_hooks=bound(httpx, max_bytes=MAX_ANSWER_BYTES, max_values=MAX_ANSWER_VALUES),
        )

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def dialect(self) -> Dialect:
        assert self.state.dialect is not None, "ask `probe` first"
        return self.state.dialect

    async def stream(self, call: ServerCall, session: str) -> AsyncGenerator[StreamChunk, None]:
        """The pieces of one answer as they come; leaving early ends the request on the server too.

        Raises `ServerFailed` (also when the stream ends without a finish reason) or `RequestRefused`.
        """
        finished = False
        try:
            async with self._client.stream(
                "POST", self.dialect.path, json=self.dialect.build_body(call), headers={"X-Session-ID": session}
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._raise_for_status(response)
                async for line in response.aiter_lines():
                    piece = self._parse_line(line)
                    if piece is not None:
                        finished = finished or bool(piece.finish)
                        yield piece
        except httpx.HTTPError as error:
            raise ServerFailed(f"{self.url}: {self._describe_exception(error)}") from error
        if not finished:
            raise ServerFailed(f"{self.url}: the answer ended in the middle")

    async def request_once(self, dialect: Dialect, call: ServerCall) -> dict[str, object] | None:
        """The whole answer as JSON; None if the server does not know such requests. Raises `ServerFailed`."""
        response = await self._post(dialect.path, dialect.build_body(call))
        if response.status_code in REFUSED | {403, 501}:
            return None
        return self._decode_json(response)

    async def request_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises `ServerFailed`, or `RequestRefused` for what the server will never do."""
        response = await self._post(path, body)
        if response.status_code != 200:
            self._raise_for_status(response)
        return self._decode_json(response)

    async def check_health(self) -> None:
        """Raises `ServerFailed` if it is not. ``/health`` where there is one, the list of models elsewhere."""
        response = await self._get("/health", HEALTH_SECONDS)
        if response.status_code == 404:
            response = await self._get("/v1/models", HEALTH_SECONDS)
        if response.status_code != 200:
            raise ServerFailed(f"{self.url}: health status {response.status_code}")

    async def fetch_model_name(self) -> str:
        """The first model that it serves. Raises `ServerFailed`."""
        listed = self._decode_json(await self._get("/v1/models", HEALTH_SECONDS))
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerFailed(f"{self.url}: /v1/models names no model") from error

    async def fetch_weight_label(self) -> str | None:
        """The label of its weights; None if it takes none (vLLM without ``VLLM_SERVER_DEV_MODE=1``)."""
        response = await self._get("/weight_info", HEALTH_SECONDS)
        return str(self._decode_json(response).get("weight_version")) if response.status_code == 200 else None

    async def update_load(self) -> None:
        """Ask how busy it is; unknown where it does not say."""
        try:
            response = await self._get("/metrics", METRICS_SECONDS)
        except ServerFailed:
            self.state.load = EngineLoad()
            return
        self.state.load = parse_load(response.text) if response.status_code == 200 else EngineLoad()

    async def load_weights(self, folder: Path, label: str) -> None:
        """Swap to the weights in a folder that the server reads too: pause, load, label, continue. Raises `ServerFailed`; then
        the server must be given good weights before it is asked for tokens again. Cancelled, it continues all the same: others
        may be served by it."""
        try:
            await self._post_control("/pause?mode=keep&clear_cache=false", {})
            await self._post_control("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            await self._post_control("/reset_prefix_cache", {})
            await self._post_control("/update_weight_version", {"new_version": label})
        finally:
            with anyio.CancelScope(shield=True):
                await self._post_control("/resume", {}, RESUME_SECONDS)

    async def _post_control(self, path: str, body: dict[str, Any], seconds: float = CONTROL_SECONDS) -> None:
        response = await self._post(path, body, seconds)
        if response.status_code != 200:
            raise ServerFailed(
                f"{self.url}{path.partition('?')[0]}: status {response.status_code}, {self._read_error_body(response)}"
            )

    async def _post(self, path: str, body: dict[str, Any], seconds: float = STALL_SECONDS) -> httpx.Response:
        try:
            return await self._client.post(path, json=body, timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS))
        except httpx.HTTPError as error:
            raise ServerFailed(f"{self.url}: {self._describe_exception(error)}") from error

    async def _get(self, path: str, seconds: float) -> httpx.Response:
        try:
            return await self._client.get(path, timeout=seconds)
        except httpx.HTTPError as error:
            raise ServerFailed(f"{self.url}: {self._describe_exception(error)}") from error

    def _parse_line(self, line: str) -> StreamChunk | None:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not data or data == "[DONE]":
            return None
        try:
            return self.dialect.parse_chunk(json.loads(data))
        except (MalformedResponse, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ServerFailed(f"{self.url}: {self._describe_exception(error)}") from error

    def _decode_json(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise ServerFailed(f"{self.url}: status {response.status_code}, {self._read_error_body(response)}")
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise ServerFailed(f"{self.url}: the answer is not JSON") from error
        if not isinstance(answer, dict):
            raise ServerFailed(f"{self.url}: the answer is no JSON object")
        return answer

    def _raise_for_status(self, response: httpx.Response) -> None:
        message = f"{self.url}: status {response.status_code}, {self._read_error_body(response)}"
        if response.status_code in REFUSED:
            raise RequestRefused(message)
        raise ServerFailed(message)

    def _describe_exception(self, error: Exception) -> str:
        return self._redact(" ".join(str(error).split()))[:300] or type(error).__name__

    def _read_error_body(self, response: httpx.Response) -> str:
        content = self._redact(response.content[:MAX_ERROR_BYTES].decode("utf-8", "replace"))
        try:
            return format_error(json.loads(content))
        except (ValueError, RecursionError):
            return format_error(content)

    def _redact(self, text: str) -> str:
        """Servers repeat a key that they refuse, and httpx a header that it cannot send."""
        return text.replace(self._key, REDACTED) if self._key else text
