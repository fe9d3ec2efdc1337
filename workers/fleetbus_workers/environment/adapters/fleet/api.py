"""The HTTP API of the Fleet platform, as far as an environment needs it: instances, their managers, verifiers, runs.

Above it is `host`; below it httpx. Facts are those of fleet-python 0.2.133 (routes, bodies, the meaning of a 409). An answer
that may come right if asked again is `FleetUnavailable`, any other `FleetRefused`. The key is in one header and nowhere else.
"""

import os
import uuid
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from fleetbus_workers.environment.base import EnvironmentFailed

DEFAULT_BASE_URL = "https://orchestrator.fleetai.com"
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
TRANSIENT_WORDS = ("health check", "timeout", "connection", "temporarily", "rate limit", "too many in-flight")
"""What the platform says, at any status, when a later try may succeed."""

REQUEST_SECONDS = 30.0
CREATE_SECONDS = 900.0
CREATE_MARGIN_SECONDS = 30
"""The platform is asked to answer so much earlier than we stop to listen."""

RUNNER_TOKEN_VARIABLE = "RUNNER_AUTH_TOKEN"
MAX_REASON = 500


class FleetError(EnvironmentFailed):
    """The Fleet platform did not do what it was asked. ``instance_id``: the instance that its answer names."""

    def __init__(self, message: str, *, status: int = 0, instance_id: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.instance_id = instance_id


class FleetRefused(FleetError):
    """It will not: a wrong key, an unknown environment, a limit of the account."""


class FleetUnavailable(FleetError):
    """Temporarily unavailable: no answer, or overloaded."""


class FleetFull(FleetUnavailable):
    """The account has as many instances as it may have, or asks too often: it can when another episode has ended."""


class InstanceUrls(msgspec.Struct, frozen=True, kw_only=True):
    """``root`` ends with a slash; ``manager`` is the base of the instance's own API."""

    root: str
    manager: str


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One running environment. ``status``: pending, running, stopped or error."""

    instance_id: str
    status: str
    urls: InstanceUrls | None = None
    health: bool | None = None
    heartbeat_region: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.status == "running" and self.health is not False and self.urls is not None


class FleetApi:
    """One client for all episodes of a worker. ``client`` has the base URL and the key; close it after use."""

    def __init__(self, client: httpx.AsyncClient, *, secret: str) -> None:
        self._client = client
        self._secret = secret
        self._runner_token: str | None = None

    async def create(self, body: dict[str, Any], *, request_id: str) -> Instance:
        """Make an instance. Repeated under the same ``request_id`` it makes no second one: the error then names the first."""
        seconds = CREATE_SECONDS
        wait = {"max_wait_seconds": int(seconds) - CREATE_MARGIN_SECONDS}
        headers = {"X-Request-ID": request_id}
        answer = await self._request("POST", "/v1/env/instances", json=body | wait, headers=headers, timeout=seconds)
        return _parse_instance(answer)

    async def instance(self, instance_id: str) -> Instance:
        return _parse_instance(await self._request("GET", f"/v1/env/instances/{instance_id}"))

    async def delete(self, instance_id: str) -> None:
        """End an instance; one that is gone already is no error."""
        try:
            await self._request("DELETE", f"/v1/env/instances/{instance_id}")
        except FleetError as error:
            if error.status not in (404, 410):
                raise

    async def delete_run(self, run_id: str) -> int:
        """End all instances with that run label; how many there were."""
        ended = await self._request("DELETE", "/v1/env/instances/batch", params={"run_id": run_id})
        return len(ended) if isinstance(ended, list) else 0

    async def runs(self) -> list[tuple[str, int]]:
        """Run labels and how many of their instances run."""
        answer = await self._request("GET", "/v1/env/runs")
        found = [run for run in answer if isinstance(run, dict)] if isinstance(answer, list) else []
        counts = ((str(run.get("run_id")), run.get("running_count")) for run in found)
        return [(label, count) for label, count in counts if isinstance(count, int)]

    async def heartbeat(self, instance: Instance) -> None:
        body = {"region": instance.heartbeat_region} if instance.heartbeat_region else {}
        await self._request("POST", f"/v1/env/instances/{instance.instance_id}/heartbeat", json=body)

    async def reset(self, instance: Instance, *, seed: int | None, seconds: float) -> None:
        """Begin the instance's episode; its manager wants the runner's token, not the key."""
        await self._manage(instance, "POST", "/reset", {"timestamp": None, "seed": seed}, seconds)

    async def query(self, instance: Instance, sql: str, args: list[Any]) -> list[dict[str, object]]:
        """Rows of the instance's database, read only; raises `LookupError` with the database's own error."""
        columns, rows = await self.select(instance, sql, args)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    async def select(
        self, instance: Instance, sql: str, args: list[Any], *, database: str = "current"
    ) -> tuple[list[str], list[list[object]]]:
        """Columns and rows from one of the instance's databases by its name; as `query`."""
        path = f"/resources/sqlite/{quote(database, safe='')}/query"
        answer = await self._manage(instance, "POST", path, {"query": sql, "args": args or None, "read_only": True}, 60.0)
        if not answer.get("success"):
            raise LookupError(str(answer.get("error") or answer.get("message") or "the query failed"))
        return answer.get("columns") or [], answer.get("rows") or []

    async def has_bundle(self, sha256: str) -> bool:
        """True if the platform has verifier code with that hash; a failure to say so is a no."""
        try:
            answer = await self._request("GET", "/v1/verifiers/check", params={"sha256": sha256})
        except FleetError:
            return False
        return isinstance(answer, dict) and bool(answer.get("success"))

    async def execute_verifier(self, body: dict[str, object], *, seconds: float) -> dict[str, Any]:
        answer = await self._request("POST", "/v1/verifiers/execute", json=body, timeout=seconds)
        if not isinstance(answer, dict):
            raise FleetRefused("Fleet: the response to a verification is not an object")
        return answer

    async def _manage(self, instance: Instance, method: str, path: str, body: object, seconds: float) -> dict[str, Any]:
        assert instance.urls is not None
        token = await self._token()
        headers = {"X-Runner-Token": token} if token else {}
        request = httpx.Request(method, instance.urls.manager + path, json=body, headers=headers)
        request.extensions["timeout"] = httpx.Timeout(seconds).as_dict()
        answer = await self._send(request, f"{method} {path}")
        return answer if isinstance(answer, dict) else {}

    async def _token(self) -> str:
        """The token that gated clusters want on calls to an instance; without one the call is made anyway."""
        if self._runner_token is None:
            self._runner_token = os.environ.get(RUNNER_TOKEN_VARIABLE, "")
        if not self._runner_token:
            try:
                answer = await self._request("GET", "/v1/runner-auth/token", timeout=10.0)
                self._runner_token = str(answer.get("token") or "") or "none"
            except (FleetError, AttributeError):
                self._runner_token = "none"
        return "" if self._runner_token == "none" else self._runner_token

    async def _request(self, method: str, path: str, *, timeout: float = REQUEST_SECONDS, **content: Any) -> Any:
        headers = {"X-Request-ID": str(uuid.uuid4()), **content.pop("headers", {})}
        try:
            request = self._client.build_request(method, path, timeout=timeout, headers=headers, **content)
        except (TypeError, ValueError) as error:
            raise FleetRefused(f"Fleet: {method} {path} cannot be sent: {self._redact(str(error))}") from error
        return await self._send(request, f"{method} {path}")

    async def _send(self, request: httpx.Request, what: str) -> object:
        try:
            response = await self._client.send(request)
        except httpx.TimeoutException as error:
            raise FleetUnavailable(f"Fleet: no answer in time to {what}") from error
        except httpx.HTTPError as error:
            raise FleetUnavailable(f"Fleet: {what}: {self._redact(str(error)) or type(error).__name__}") from error
        if response.is_success:
            return _parse_json(response)
        raise self._error(response, what)

    def _error(self, response: httpx.Response, what: str) -> FleetError:
        body = _parse_json(response)
        detail = body.get("detail", body) if isinstance(body, dict) else body
        fields = detail if isinstance(detail, dict) else {}
        said = str(fields.get("message") or fields.get("error") or detail or response.reason_phrase)
        message = f"Fleet: {what} was answered with HTTP {response.status_code}: {self._redact(said)}"
        is_transient = response.status_code in TRANSIENT_STATUS or fields.get("retryable") is True
        is_transient = is_transient or any(word in said.lower() for word in TRANSIENT_WORDS)
        kind = FleetFull if _is_full(response.status_code, fields, said) else FleetUnavailable if is_transient else FleetRefused
        return kind(message, status=response.status_code, instance_id=str(fields.get("instance_id") or ""))

    def _redact(self, text: str) -> str:
        return " ".join(text.replace(self._secret, "[redacted]").split())[:MAX_REASON]


def _is_full(status: int, fields: dict[str, object], said: str) -> bool:
    words = ("instance limit", "instance_limit", "too many in-flight", "rate limit")
    stated = f"{fields.get('error_type') or ''} {said}".lower()
    return status == 429 or (status in (400, 403) and any(word in stated for word in words))


def _parse_json(response: httpx.Response) -> object:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text


def _parse_instance(answer: Any) -> Instance:
    """An instance as the platform describes it; raises `FleetRefused` for what is none."""
    try:
        urls = answer.get("urls")
        found = None
        if urls:
            root, manager = str(urls["root"]), str(urls["manager"]["api"])
            found = InstanceUrls(root=root if root.endswith("/") else root + "/", manager=manager.rstrip("/"))
        return Instance(
            instance_id=str(answer["instance_id"]),
            status=str(answer["status"]),
            urls=found,
            health=answer.get("health"),
            heartbeat_region=answer.get("heartbeat_region"),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise FleetRefused(f"Fleet: an answer describes no instance ({type(error).__name__}: {error})") from error
