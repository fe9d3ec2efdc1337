"""Static routes of an OpenEnv gateway: health, metadata, schemas, OpenAPI, and 501 for its task routes."""

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

NAME = "fleetbus"

ACTION_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The text of the policy"},
        "type": {"enum": ["call_tool", "list_tools"]},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
        "metadata": {"type": "object", "description": "request_id names the step: a repetition is not executed again"},
    },
}
OBSERVATION_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "<image> stands where each image is"},
        "messages": {"type": "array", "description": "Chat messages; images are image_url parts with data: URLs"},
        "tools": {"type": "array"},
        "metadata": {"type": "object"},
    },
}
STATE_SCHEMA = {"type": "object", "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}}

_OBSERVED = {
    "type": "object",
    "properties": {
        "observation": OBSERVATION_SCHEMA,
        "reward": {"type": ["number", "null"]},
        "done": {"type": "boolean"},
        "metadata": {"type": ["object", "null"]},
    },
}
_RESET = {
    "type": "object",
    "properties": {"seed": {"type": ["integer", "null"], "minimum": 0}, "episode_id": {"type": ["string", "null"]}},
}
_STEP = {
    "type": "object",
    "required": ["action"],
    "properties": {
        "action": ACTION_SCHEMA,
        "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "request_id": {"type": ["string", "null"], "maxLength": 255},
    },
}
_ANY = {"type": "object"}


def build_metadata_routes() -> list[BaseRoute]:
    """The routes that need no environment."""
    tasks = [
        Route(f"/{{env_name}}/{path}", _build_unsupported_route(method), methods=[verb])
        for path, (verb, method) in {
            "splits": ("GET", "list_splits"),
            "tasks": ("POST", "list_tasks"),
            "num_tasks": ("POST", "num_tasks"),
            "task": ("POST", "get_task"),
            "task_range": ("POST", "get_task_range"),
        }.items()
    ]
    return [
        Route("/health", _health, methods=["GET"]),
        Route("/metadata", _metadata, methods=["GET"]),
        Route("/schema", _schema, methods=["GET"]),
        Route("/openapi.json", _openapi, methods=["GET"]),
        Route("/list_environments", _list_environments, methods=["GET"]),
        *tasks,
    ]


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "healthy"})


async def _metadata(request: Request) -> Response:
    about = {"name": NAME, "description": "Environments of a fleetbus run", "version": version("fleetbus")}
    return JSONResponse(about | {"readme_content": None, "author": None, "documentation_url": None})


async def _schema(request: Request) -> Response:
    schemas = {"action": ACTION_SCHEMA, "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA}
    return JSONResponse(schemas | {"reset_observation": OBSERVATION_SCHEMA})


async def _openapi(request: Request) -> Response:
    about = {"title": NAME, "version": version("fleetbus"), "description": "The OpenEnv protocol; episodes go over WS /ws"}
    paths = {
        "/reset": {"post": _build_operation("Begin an episode", answer=_OBSERVED, body=_RESET)},
        "/step": {"post": _build_operation("Execute an action", answer=_OBSERVED, body=_STEP)},
        "/state": {"get": _build_operation("The episode's state", answer=STATE_SCHEMA)},
        "/mcp": {"post": _build_operation("JSON-RPC: tools/list, tools/call", answer=_ANY, body=_ANY)},
        "/health": {"get": _build_operation("Whether the gateway answers", answer=_ANY)},
        "/metadata": {"get": _build_operation("Metadata of this server", answer=_ANY)},
        "/schema": {"get": _build_operation("Schemas of actions, observations and state", answer=_ANY)},
        "/list_environments": {"get": _build_operation("The name for the task routes", answer={"type": "array"})},
    }
    return JSONResponse({"openapi": "3.1.0", "info": about, "paths": paths})


def _build_operation(summary: str, *, answer: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, object]:
    operation = {"summary": summary, "responses": {"200": {"description": "OK", "content": _build_json_content(answer)}}}
    return operation | ({"requestBody": {"content": _build_json_content(body)}} if body is not None else {})


def _build_json_content(schema: dict[str, object]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


async def _list_environments(request: Request) -> Response:
    return JSONResponse([NAME])


def _build_unsupported_route(method: str) -> Any:
    async def answer(request: Request) -> Response:
        name = request.path_params["env_name"]
        if name.lower() != NAME:
            return JSONResponse({"detail": f"unknown environment {name!r}"}, status_code=404)
        return JSONResponse({"detail": f"{method} is not supported for this environment"}, status_code=501)

    return answer
