"""One episode's use of a Fleet instance, as one connection: made, reset, its tools listed once, called, deleted.

Above it is `McpEnvironment`; below it the host, which owns the instance, and MCP connections to the instance's endpoints. The
table of what fails: making the instance or listing its tools fails the episode; a reset that fails is a warning; a call that
fails is an observation; an instance that died fails the episode.
"""

import json
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus.core.text.grid import build_grid_tool, convert_to_pixels, find_screen_size
from fleetbus_schemas import Task, ToolSpec
from fleetbus_workers.environment.adapters.fleet.api import FleetError, Instance
from fleetbus_workers.environment.adapters.fleet.host import FleetHost, InstanceLease
from fleetbus_workers.environment.adapters.mcp.connection import ToolResult, decode_image
from fleetbus_workers.environment.adapters.mcp.http_connection import EndpointAbsent, http_connection
from fleetbus_workers.environment.adapters.mcp.merged_connection import MergedConnection
from fleetbus_workers.environment.base import EnvironmentFailed

COMPUTER = "computer"
SUBMIT = "submit_final_answer"
SCREEN_MODALITIES = ("computer_use", "browser_use")
MIN_TTL_SECONDS = {"tool_use": 900, "computer_use": 1800, "browser_use": 1800}
DISCONNECT_SECONDS = 5.0
MAX_PAUSE_SECONDS = 5.0
MIN_TRY_SECONDS = 10.0
"""The last try to list the tools has at least so long."""

log = structlog.get_logger(__name__)

SUBMIT_TOOL = ToolSpec(
    name=SUBMIT,
    description="Submit the final answer to the task. This ends the session.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer"}},
        "required": ["answer"],
    },
)


class FleetConnection:
    """See the module. ``call_seconds`` bounds a call, ``episode_seconds`` is how long an instance has to live at least."""

    def __init__(self, host: FleetHost, task: Task, *, call_seconds: float, episode_seconds: float) -> None:
        self._host = host
        self.task = task
        self._call_seconds = call_seconds
        self._episode_seconds = episode_seconds
        self._lease: InstanceLease | None = None
        self._endpoints: MergedConnection | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._screen: tuple[int, int] | None = None
        self.instance: Instance | None = None

    async def open(self) -> None:
        """Raises `FleetError` when there is no instance, `EnvironmentFailed` when there are no tools."""
        self._lease = self._host.lease(build_instance_request(self.task, self._host, self._episode_seconds))
        self.instance = await self._lease.get()
        await self._reset(self.instance)
        self._tools = self._select_tools(await self._connect(self.instance))

    async def _reset(self, instance: Instance) -> None:
        assert self._host.api is not None
        seconds = self._host.settings.reset_seconds
        try:
            await self._host.api.reset(instance, seed=self.task.seed, seconds=seconds)
        except FleetError as error:
            log.warning("fleet instance reset failed; continuing", instance=instance.instance_id, reason=str(error))

    async def _connect(self, instance: Instance) -> tuple[ToolSpec, ...]:
        """Connect and list, again and again while the instance's servers come up. An endpoint that does not exist is none of
        the instance's; one that merely does not answer in time is done without if the other one has tools."""
        deadline = anyio.current_time() + self._host.settings.ready_seconds
        pause = 0.25
        while True:
            is_last = anyio.current_time() + pause >= deadline
            optional = (EnvironmentFailed,) if is_last else (EndpointAbsent,)
            self._endpoints = self._build_connection(instance, optional)
            try:
                with anyio.fail_after(max(deadline - anyio.current_time(), MIN_TRY_SECONDS)):
                    await self._endpoints.open()
                    tools = await self._endpoints.list_tools()
                if tools:
                    return tools
                reason = "it has none"
            except TimeoutError:
                reason = "no answer in time"
            except EnvironmentFailed as error:
                reason = str(error)
            await self._disconnect()
            if is_last or anyio.current_time() >= deadline:
                raise EnvironmentFailed(f"the tools of Fleet instance {instance.instance_id} cannot be listed: {reason}")
            await anyio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _build_connection(self, instance: Instance, optional: tuple[type[EnvironmentFailed], ...]) -> MergedConnection:
        assert instance.urls is not None
        paths = ("api/v1/mcp",) if self.task.modality == "computer_use" else ("mcp", "api/v1/mcp")
        connections = {
            f"/{path}": http_connection(
                instance.urls.root + path,
                self._host.connections,
                call_seconds=self._call_seconds,
                headers=self._host.build_headers(instance.urls.root),
            )
            for path in paths
        }
        return MergedConnection(connections, clashes="first", optional=optional)

    def _select_tools(self, tools: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
        """The tools that the task's modality is for."""
        if self.task.modality in SCREEN_MODALITIES:
            computer = next((tool for tool in tools if tool.name == COMPUTER), None)
            if computer is None:
                names = ", ".join(tool.name for tool in tools)
                raise EnvironmentFailed(f"task {self.task.key} is {self.task.modality}, and its instance has only: {names}")
            if self._host.settings.grid:
                self._screen = find_screen_size(computer)
                computer = build_grid_tool(computer)
            return (computer,)
        selected = tuple(tool for tool in tools if tool.name != COMPUTER)
        if SUBMIT in self.task.prompt and all(tool.name != SUBMIT for tool in selected):
            selected += (SUBMIT_TOOL,)
        return selected

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        await anyio.lowlevel.checkpoint()
        return self._tools

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        assert self._endpoints is not None
        if name == SUBMIT and SUBMIT_TOOL in self._tools:
            return _record_answer(arguments)
        if name == COMPUTER and arguments.get("action") == "done":
            return ToolResult(content="", ends=True)
        if name == COMPUTER and self._screen is not None:
            try:
                arguments = convert_to_pixels(arguments, self._screen)
            except ValueError as error:
                return ToolResult(content=str(error), failed=True)
        return read_result(await self._endpoints.call_tool(name, arguments))

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        """Rows of the instance's current database, for verifiers that run here."""
        assert self._host.api is not None
        if self.instance is None:
            raise LookupError("there is no instance")
        return await self._host.api.query(self.instance, sql, list(params))

    async def database(self, name: str, sql: str, params: Sequence[object]) -> dict[str, Any]:
        """Columns and rows of one of the instance's databases, for verifiers that run here."""
        assert self._host.api is not None
        if self.instance is None:
            raise LookupError("there is no instance")
        columns, rows = await self._host.api.select(self.instance, sql, list(params), database=name)
        return {"columns": columns, "rows": rows}

    async def close(self) -> None:
        """Disconnect, then have the instance deleted; the deletion does not depend on this call being awaited."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self._disconnect()
        finally:
            lease.released.set()
        await lease.release()

    async def _disconnect(self) -> None:
        endpoints, self._endpoints = self._endpoints, None
        if endpoints is not None:
            with anyio.move_on_after(DISCONNECT_SECONDS):
                await endpoints.close()


def build_instance_request(task: Task, host: FleetHost, episode_seconds: float) -> dict[str, object]:
    """The body of the request for an instance; empty fields are left out. Raises `EnvironmentFailed` for a task that
    names no environment, or an unknown modality."""
    env, _, env_version = task.env.partition(":")
    if task.modality not in MIN_TTL_SECONDS:
        modalities = ", ".join(MIN_TTL_SECONDS)
        raise EnvironmentFailed(f"task {task.key} has task_modality {task.modality!r}; it must be one of {modalities}")
    if not env:
        raise EnvironmentFailed(f"task {task.key} names no Fleet environment; give it an env_key")
    data = str(task.config.get("data_key") or task.config.get("data_id") or "")
    data_key, _, data_version = data.partition(":")
    ttl_seconds = host.settings.ttl_seconds or max(MIN_TTL_SECONDS.get(task.modality, 900), int(episode_seconds) + 60)
    request = {
        "env_key": env,
        "env_version": _format_version(env_version or task.version),
        "data_key": data_key,
        "data_version": _format_version(data_version or str(task.config.get("data_version") or "")),
        "region": host.settings.region,
        "env_variables": task.env_variables,
        "image_type": "mcp" if task.modality == "computer_use" else "",
        "ttl_seconds": ttl_seconds,
    }
    return {name: value for name, value in request.items() if value}


def read_result(result: ToolResult) -> ToolResult:
    """Read the JSON text of Fleet's servers: errors that MCP's own flag does not show, and a screenshot in a field."""
    if not isinstance(result.content, str) or not result.content.lstrip().startswith("{"):
        return result
    try:
        value = json.loads(result.content)
    except (ValueError, RecursionError):
        return result
    failed = result.failed or bool(value.get("error")) or value.get("status") == "failed" or value.get("isError") is True
    if "base64_image" not in value:
        return msgspec.structs.replace(result, failed=failed)
    image = decode_image({"data": value.pop("base64_image"), "mimeType": value.get("media_type")})
    text = json.dumps(value, ensure_ascii=False) if value else "[screenshot]"
    if image is None:
        return msgspec.structs.replace(result, content="the screenshot could not be taken", failed=True)
    return msgspec.structs.replace(result, content=text, failed=failed, images=(*result.images, image))


def _record_answer(arguments: dict[str, object]) -> ToolResult:
    answer = arguments.get("answer")
    if answer is None:
        return ToolResult(content=f"{SUBMIT} needs an answer", failed=True)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return ToolResult(content="Answer recorded. The session ends here.", ends=True, answer=text)


def _format_version(version: str) -> str:
    return f"v{version}" if version[:1].isdigit() else version
