"""Environments on a resources server of NeMo Gym 0.7: a session per episode, its tools, and the reward that it verifies.

A task's ``config.row`` is a row of Gym's dataset as it stands: messages and tools in ``responses_create_params``, and what the
server itself reads. The row seeds the session, and goes to ``/verify`` with what was said, as Gym's simple agent sends them. A
sample that the server masks, and a verdict without a number, is no reward but a reason. Above it is the session of an
environment worker, below it HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import httpx

from fleetbus.core.text.prompts import NO_CALL, format_error, format_unknown_tool, truncate_text
from fleetbus.core.text.tool_calls import is_done, parse_tool_calls
from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task, ToolCall, ToolSpec
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.system_prompts import build_system_prompt
from fleetbus_workers.environment.adapters.common.tool_results import build_tool_messages, is_final_answer, read_final_answer
from fleetbus_workers.environment.adapters.nemo_gym.items import (
    build_call,
    build_message,
    build_response,
    read_prompt,
    read_tools,
    read_verdict,
)
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.environment.task_permissions import check_http_address
from fleetbus_workers.serving.bounded_http import bound
from fleetbus_workers.serving.bounded_json import check_values

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle

CONNECT_SECONDS = 20.0
MAX_OUTPUT_BYTES = 64 << 20
"""Of all calls of an episode: outputs are kept for its verdict."""
SEED_TRIES = 3
"""A seed may be repeated: a session is known by the cookie of its answer, and by nothing where that was lost."""
SEED_PAUSE_SECONDS = 0.5
STAND_INS = (401, 403, 407, 429, 502, 503, 504)
"""Answers of what stands before a server; all others are the server's own, and for the policy to read."""


def build(context: AdapterContext) -> Factory:
    """Environments on the server at the spec's URL. Raises `UserError` if that is none."""
    limits, trust = context.settings.limits, httpx.create_ssl_context()  # once: it takes long enough to block a worker
    options = (limits.tool_call, limits.verify, context.prompt or "fleet", context.observation_bytes)
    return Factory(partial(NemoGymEnvironment, check_url(context.rest), *options, trust=trust))


def check_url(url: str) -> str:
    """The address without a slash at its end. Raises `UserError`."""
    parts = check_http_address(f"nemo-gym:{url}", url, example="nemo-gym:http://HOST:PORT")
    if parts.query or parts.fragment:
        raise UserError(f"the address of {parts.hostname} must be written as nemo-gym:http://HOST:PORT")
    return url.rstrip("/")


class NemoGymEnvironment:
    """One episode on the server at ``url``; a call may take ``call_seconds``, a verdict ``verify_seconds``. The server is told
    of calls, outputs, and texts without a call; where tools are told in words, an answer marked as the last one ends it."""

    replayable = False

    def __init__(
        self,
        url: str,
        call_seconds: float,
        verify_seconds: float,
        prompt: PromptStyle = "fleet",
        observation_bytes: int = 32_768,
        *,
        trust: SSLContext | bool = True,
    ) -> None:
        self._url = url
        self._seconds, self._verify_seconds = call_seconds, verify_seconds
        self._prompt = prompt
        self._bytes = observation_bytes
        self._trust = trust
        self._client: httpx.AsyncClient | None = None
        self._task = Task(key="")
        self._row: dict[str, Any] = {}
        self._tools: tuple[ToolSpec, ...] = ()
        self._messages: tuple[ChatMessage, ...] = ()
        self._items: list[dict[str, Any]] = []
        self._output_bytes = 0

    async def open(self, task: Task) -> None:
        """Read the row of the task and seed a session. Raises `EnvironmentFailed`."""
        row = task.config.get("row")
        if task.verifier:
            raise EnvironmentFailed(f"task {task.key} has a verifier of its own: the server of NeMo Gym verifies")
        if not isinstance(row, dict):
            raise EnvironmentFailed(f"task {task.key} has no row in its config: a row of the server's dataset, as it stands")
        self._task, self._row, self._tools, self._messages = task, row, read_tools(row), read_prompt(row)
        if task.prompt:
            self._messages = (ChatMessage(role="system", content=task.prompt), *self._messages)
        timeout = httpx.Timeout(None, connect=min(CONNECT_SECONDS, self._seconds))  # `_post` limits all of a call
        self._client = httpx.AsyncClient(timeout=timeout, verify=self._trust, event_hooks=bound(httpx))
        for remaining in reversed(range(SEED_TRIES)):
            try:
                seeded = await self._post("seed_session", row, self._seconds)
                break
            except EnvironmentFailed:
                if not remaining:
                    raise
                await anyio.sleep(SEED_PAUSE_SECONDS)
        if seeded.status_code != 200:
            raise EnvironmentFailed(f"{self._url}/seed_session: HTTP {seeded.status_code}: {clean_error(seeded.text)[:500]}")

    async def reset(self) -> Start:
        told = build_system_prompt(self._prompt, self._tools, self._task)
        messages = (ChatMessage(role="system", content=told), *self._messages) if told else self._messages
        tools = self._tools if self._prompt == "template" else ()
        return Start(messages=messages, tools=tools, prompted=int(bool(told)), offered=self._tools)

    async def step(self, action: Action) -> Step:
        """Execute the calls of an answer in their order."""
        written = self._prompt != "template"
        calls = tuple(parse_tool_calls(action.text).calls) if written and not action.tool_calls else action.tool_calls
        if not calls:
            self._items.append(build_message(len(self._items), read_final_answer(action)))
            if not self._tools or (is_done(action.text) if written else is_final_answer(action)):
                return Step(terminated=True)
        outputs, errors = [], 0
        for call in calls:
            output, failed = await self._call(call)
            self._items += build_call(len(self._items), call, output)
            outputs.append(truncate_text(output, self._bytes))
            errors += failed
        done = bool(calls) and written and is_done(action.text)
        return Step(messages=self._show(action, outputs), terminated=done, tool_calls=len(calls), tool_errors=errors)

    def _show(self, action: Action, outputs: Sequence[str]) -> tuple[ChatMessage, ...]:
        if self._prompt == "template":
            return build_tool_messages(action, outputs)
        return (ChatMessage(role="user", content="\n\n".join(outputs) or NO_CALL),)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """The output of a tool, and True if it failed."""
        if all(tool.name != call.name for tool in self._tools):
            return format_unknown_tool(call.name, self._tools), True
        try:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # the policy's own: as a failure it would be a way out of a bad episode
            return format_error(f"the arguments are no JSON: {error}"), True
        answer = await self._post(quote(call.name, safe=""), call.arguments, self._seconds)
        self._output_bytes += len(answer.content)
        if self._output_bytes > MAX_OUTPUT_BYTES:
            raise EnvironmentFailed(
                f"{self._url}/{call.name}: the outputs of this episode have more than {MAX_OUTPUT_BYTES} bytes"
            )
        return answer.text, answer.status_code >= 400

    async def _post(self, path: str, body: Any, seconds: float) -> httpx.Response:
        if self._client is None:
            raise EnvironmentFailed("the session is not open")
        try:
            with anyio.fail_after(seconds):
                answer = await self._client.post(f"{self._url}/{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
            what = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)
            raise EnvironmentFailed(f"{self._url}/{path}: {what or type(error).__name__}") from error
        if answer.status_code in STAND_INS or 300 <= answer.status_code < 400:
            raise EnvironmentFailed(f"{self._url}/{path}: HTTP {answer.status_code}")
        return answer

    async def state(self) -> dict[str, Any]:
        return {"items": len(self._items)}

    async def verify(self) -> Verdict:
        """The server's own verdict; no reward, with the reason, where it masks the sample or cannot be read."""
        graded = self._row | {"response": build_response(self._row, self._items)}
        answer = await self._post("verify", graded, self._verify_seconds)
        if answer.status_code != 200:
            return Verdict(reward=None, reason=f"/verify: HTTP {answer.status_code}: {clean_error(answer.text)[:500]}")
        try:
            check_values(answer.content)
            return read_verdict(answer.json())
        except (ValueError, RecursionError) as error:
            return Verdict(reward=None, reason=f"/verify: not JSON: {error}")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
