"""One client of the OpenEnv gateway: its frames as calls to a session on the bus, and the answers as observations.

An action is ``{"text": ...}`` (or ``{"message": ...}``), or a tool call as OpenEnv's MCP environments have it. Every tool call
is a step, however it comes, so that rewards and counts are right.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from fleetbus.client.sessions import SessionClient, SessionUnavailable
from schemas import ChatMessage, SessionAnswer, SessionCall, Task, ToolCall, ToolSpec
from schemas.chat import Text

RESET_KEYS = ("seed", "episode_id")
TASK_KEYS = {"task_key": "key", "env_key": "env", "prompt": "prompt"}
CLOSE_SECONDS = 40.0


class FrameError(Exception):
    """An error frame that leaves the session as it is. ``code`` is one of the protocol's."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class AtCapacity(Exception):
    """No slot was free in time; the connection ends."""


class OpenEnvEpisode:
    """``capacity_seconds``: how long a reset waits for a slot; ``call_seconds``: how long any other call may take."""

    def __init__(self, client: SessionClient, *, capacity_seconds: float, call_seconds: float) -> None:
        self._client = client
        self._capacity_seconds = capacity_seconds
        self._call_seconds = call_seconds
        self._session = ""
        self._settings: dict[str, Any] = {}
        self._calls = 0
        self._over = True
        self.tools: tuple[ToolSpec, ...] = ()
        self.steps = 0

    @property
    def name(self) -> str:
        return self._session

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode; other settings than before get a session of their own."""
        seed = data.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise FrameError("VALIDATION_ERROR", "seed must be a whole number of 0 or more")
        settings = {name: value for name, value in data.items() if name not in RESET_KEYS}
        if self._session and settings != self._settings:
            await self.close()
        if not self._session:
            await self._open(settings, seed)
        answer = await self._made("reset", seed=seed)
        self.tools, self.steps, self._over = answer.tools, 0, False
        return _observation(answer, tools=answer.tools) | {"reward": None, "done": False}

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """One action; raises `FrameError` when it cannot be read or comes at the wrong time."""
        if data.get("type") == "list_tools":
            return {"observation": {"tools": _listed(self.tools)}, "reward": None, "done": False}
        text, calls = _action(data)
        if not self._session or self._over:
            raise FrameError("EXECUTION_ERROR", "the episode is over or has not begun: reset first")
        answer = await self._made("step", text=text, tool_calls=calls)
        self.steps += 1
        self._over = answer.terminated or answer.truncated
        reward = answer.reward or 0.0
        if self._over and not reward:
            verdict = await self._made("verify")
            if verdict.reward is None:
                raise FrameError("EXECUTION_ERROR", f"the episode has no verdict: {verdict.reason or 'unknown'}")
            reward = verdict.reward
        return _observation(answer) | {"reward": reward, "done": self._over}

    async def state(self) -> dict[str, Any]:
        told = (await self._made("state")).state if self._session else {}
        return told | {"episode_id": self._session or None, "step_count": self.steps}

    async def rpc(self, request: Any) -> dict[str, Any]:
        """One JSON-RPC request of the protocol's MCP; never raises for what the client did wrong."""
        if not isinstance(request, dict) or not isinstance(request.get("method"), str):
            return _rpc_error(None, -32600, "a request has a method")
        number, method, parameters = request.get("id"), request["method"], request.get("params") or {}
        if method == "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters} for tool in self.tools
            ]
            return {"jsonrpc": "2.0", "id": number, "result": {"tools": tools}}
        if method != "tools/call":
            return _rpc_error(number, -32601, f"Method not found: {method}")
        if not isinstance(parameters, dict) or not isinstance(parameters.get("name"), str):
            return _rpc_error(number, -32602, "tools/call needs the name of a tool")
        action = {"type": "call_tool", "tool_name": parameters["name"], "arguments": parameters.get("arguments") or {}}
        try:
            told = await self.step(action)
        except FrameError as error:
            return _rpc_error(number, -32603, str(error))
        text = told["observation"]["text"]
        result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": False}
        return {"jsonrpc": "2.0", "id": number, "result": result | {"reward": told["reward"], "done": told["done"]}}

    async def close(self) -> None:
        """Release the slot; harmless if there is none."""
        session, self._session = self._session, ""
        self._over = True
        if session:
            call = SessionCall(session=session, call="close", key="close")
            await self._client.call(call, timeout=CLOSE_SECONDS)

    async def _open(self, settings: dict[str, Any], seed: int | None) -> None:
        named = {field: str(settings[key]) for key, field in TASK_KEYS.items() if key in settings}
        config = {name: value for name, value in settings.items() if name not in TASK_KEYS}
        task = msgspec.structs.replace(Task(key="openenv", config=config, seed=seed), **named)
        self._session, self._settings, self._calls = secrets.token_hex(16), settings, 0
        try:
            await self._made("open", task=task)
        except SessionUnavailable as error:
            self._session = ""
            raise AtCapacity(str(error)) from error

    async def _made(self, kind: Any, **fields: Any) -> SessionAnswer:
        self._calls += 1
        call = SessionCall(session=self._session, call=kind, key=f"{self._calls}", **fields)
        seconds = self._capacity_seconds if kind == "open" else self._call_seconds
        answer = await self._client.call(call, timeout=seconds)
        if answer.refusal and answer.end is None:
            raise FrameError("EXECUTION_ERROR", answer.error)
        if answer.end is not None:
            self._session, self._over = "", True
            raise FrameError(
                "EXECUTION_ERROR", answer.error or f"the session is over: {answer.end}", error_class=answer.error_class
            )
        return answer


def _action(data: dict[str, Any]) -> tuple[str, tuple[ToolCall, ...]]:
    if data.get("type") == "call_tool":
        name, arguments = data.get("tool_name"), data.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise FrameError("VALIDATION_ERROR", "a tool call has a tool_name and an object of arguments")
        return "", (ToolCall(name=name, arguments=arguments),)
    text = data.get("text", data.get("message"))
    if not isinstance(text, str):
        raise FrameError("VALIDATION_ERROR", "an action has a text, or is a call_tool")
    return text, ()


def _observation(answer: SessionAnswer, *, tools: tuple[ToolSpec, ...] = ()) -> dict[str, Any]:
    shown = [{"role": message.role, "content": _content(message)} for message in answer.messages]
    told: dict[str, Any] = {"text": "\n".join(each["content"] for each in shown if each["role"] != "system"), "messages": shown}
    if tools:
        told["tools"] = _listed(tools)
    metadata = answer.state | ({"truncated": True} if answer.truncated else {})
    return {"observation": told | {"metadata": metadata}} | ({"metadata": metadata} if metadata else {})


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text if isinstance(part, Text) else "<image>" for part in message.content)


def _listed(tools: tuple[ToolSpec, ...], *, schema: str = "input_schema") -> list[dict[str, Any]]:
    return [{"name": tool.name, "description": tool.description, schema: tool.parameters} for tool in tools]


def _rpc_error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": None}}
