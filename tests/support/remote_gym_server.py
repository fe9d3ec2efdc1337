"""A small server of the remote-gym protocol, written from what its bytes were observed to be; both generations of answers.

Sessions count up to a goal: the action "up" adds one, and rewards 1 at the goal, which ends the episode. Certain actions make
certain things happen: see `RemoteGymDouble._step`. Everything runs on the loop of the test, on a port of its own.
"""

from __future__ import annotations

import io
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import h11
from anyio.abc import SocketStream
from PIL import Image


class _Answer(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RemoteGymDouble:
    """``executed`` counts what environments really did, ``requests`` what arrived; ``lose`` drops the answers to these methods,
    once each. ``remembers``: repetitions are answered from memory, by their boundary, as ``/health`` then says."""

    def __init__(
        self, *, goal: int = 3, sessions: int = 0, key: str = "", images: str = "", remembers: bool = False, old: bool = False
    ) -> None:
        self.goal = goal
        self.most = sessions
        self.key = key
        self.images = images
        self.remembers = remembers
        self.old = old
        self.port = 0
        self.sessions: dict[str, int] = {}
        self.configs: list[dict[str, Any]] = []
        self.executed: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.lose: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.most_sessions = 0
        self.hanging, self.release = anyio.Event(), anyio.Event()
        self._memory: dict[str, tuple[int, bytes]] = {}
        self._scope: anyio.CancelScope | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Listen until `kill`, on the same port as before if there was one."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self.port, reuse_port=False)
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with anyio.CancelScope() as self._scope:
            async with listener:
                task_status.started()
                await listener.serve(self._connection)

    def kill(self) -> None:
        """As a killed process: sockets are cut, sessions forgotten."""
        self.sessions.clear()
        self._memory.clear()
        if self._scope is not None:
            self._scope.cancel()

    async def _connection(self, stream: SocketStream) -> None:
        async with stream:
            try:
                await self._speak(stream)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, h11.RemoteProtocolError):
                pass

    async def _speak(self, stream: SocketStream) -> None:
        wire = h11.Connection(h11.SERVER)
        while True:
            request, body = await _receive(wire, stream)
            if request is None:
                return
            status, kind, content = await self._respond(request, body)
            if status == 0:
                return
            headers = [("Content-Type", kind), ("Content-Length", str(len(content)))]
            await stream.send(wire.send(h11.Response(status_code=status, headers=headers)) or b"")
            await stream.send((wire.send(h11.Data(data=content)) or b"") + (wire.send(h11.EndOfMessage()) or b""))
            wire.start_next_cycle()

    async def _respond(self, request: h11.Request, body: bytes) -> tuple[int, str, bytes]:
        headers = {name.decode().lower(): value.decode() for name, value in request.headers}
        path = request.target.decode()
        if path == "/health":
            facts = {"ok": True, "service": "gym-env-service", "max_inflight": "unlimited", "idempotent": self.remembers}
            return 200, "application/json", json.dumps(facts).encode()
        boundary = headers["content-type"].partition("boundary=")[2].strip('"')
        fields = _read(boundary, body)
        method = "connect" if path == "/connect" else fields["method"]
        self.requests.append((method, boundary))
        try:
            if self.key and headers.get("x-api-key") != self.key:
                raise _Answer(401, "unauthorized")
            if self.busy[method] > 0:
                self.busy[method] -= 1
                raise _Answer(503, "server busy")
            content = self._memory[boundary][1] if boundary in self._memory else await self._execute(method, fields)
        except _Answer as answer:
            return answer.status, "application/json", json.dumps({"detail": str(answer)}).encode()
        if self.remembers:
            self._memory[boundary] = (200, content)
        if self.lose[method] > 0:
            self.lose[method] -= 1
            return 0, "", b""
        answer_boundary = content[2 : content.index(b"\r\n")].decode()
        return 200, f'multipart/{"form-data" if self.old else "mixed"}; boundary="{answer_boundary}"', content

    async def _execute(self, method: str, fields: dict[str, Any]) -> bytes:
        self.executed[method] += 1
        if method == "connect":
            return self._connect(fields)
        session, params = fields["session_id"], fields["params"]
        if session not in self.sessions:
            raise _Answer(404, f"Session {session} not found")
        match method:
            case "system_prompt":
                return self._encode({"obs": "Say up."})
            case "reset":
                self.sessions[session] = 0
                return self._encode({"obs": "at 0", "info": {}})
            case "close":
                del self.sessions[session]
                return self._encode({"closed": True})
        return await self._step(session, params["action_str"])

    def _connect(self, fields: dict[str, Any]) -> bytes:
        if self.most and len(self.sessions) >= self.most:
            raise _Answer(503, f"Max sessions limit reached ({self.most}). Please try again later or close existing sessions.")
        self.configs.append(fields["env_config"])
        session = uuid.uuid4().hex
        self.sessions[session] = 0
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        answer = {"session_id": session}
        if "seed" in fields:
            answer.update(obs=f"seed {fields['seed']}, at 0", info={})  # type: ignore[call-overload]
        return self._encode(answer, picture=True)

    async def _step(self, session: str, action: str) -> bytes:
        match action:
            case "raise":
                raise _Answer(500, "the world broke")
            case "hang":
                self.hanging.set()
                await self.release.wait()
            case "nan":
                return self._encode({"obs": "", "reward": float("nan"), "done": False, "info": {}})
            case "unusable":
                info = {"training_usable": False, "error": "its world is gone"}
                return self._encode({"obs": "", "reward": 0.0, "done": True, "info": info})
            case "give up":
                info = {"TimeLimit.truncated": True}
                return self._encode({"obs": "", "reward": 0.0, "done": True, "info": info})
        self.sessions[session] += action == "up"
        done = self.sessions[session] >= self.goal
        fields = {"obs": f"at {self.sessions[session]}", "reward": float(done), "done": done, "info": {"success": done}}
        return self._encode(fields, picture=True)

    def _encode(self, fields: dict[str, Any], *, picture: bool = False) -> bytes:
        boundary = f"gym_env_{uuid.uuid4().hex}"
        parts = []
        show = picture and self.images and "obs" in fields
        if show:
            fields = {**fields, "obs": f"see <image> {fields['obs']}"}
        name = '"data"; filename="data.json"' if self.old else '"data"'
        parts.append((f"form-data; name={name}", "application/json; charset=utf-8", json.dumps(fields).encode()))
        if show:
            parts.append(('form-data; name="images"; filename="0.png"', "image/png", png(self.images)))
        encoded = b"".join(
            f"--{boundary}\r\nContent-Disposition: {head}\r\nContent-Type: {kind}\r\n\r\n".encode() + payload + b"\r\n"
            for head, kind, payload in parts
        )
        return encoded + f"--{boundary}--\r\n".encode()


def png(mode: str) -> bytes:
    """A small picture whose pixels are no line of text: every byte value, so that splitting at line ends would show."""
    size = (16, 16)
    data = bytes(index % 256 for index in range(16 * 16 * len(Image.new(mode, (1, 1)).getbands())))
    buffer = io.BytesIO()
    Image.frombytes(mode, size, data).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


async def _receive(wire: h11.Connection, stream: SocketStream) -> tuple[h11.Request | None, bytes]:
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            try:
                wire.receive_data(await stream.receive())
            except anyio.EndOfStream:
                wire.receive_data(b"")
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return request, bytes(body)
        else:
            return None, b""


def _read(boundary: str, body: bytes) -> dict[str, Any]:
    """As the first and as the later servers read it: the part named data, which must not look like a file."""
    for chunk in body.split(f"--{boundary}".encode())[1:-1]:
        head, _, payload = chunk.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        assert b'name="data"' in head
        assert b"filename" not in head
        assert b"application/json" in head
        fields: dict[str, Any] = json.loads(payload.removesuffix(b"\r\n"))
    return fields


@asynccontextmanager
async def remote_gym_double(*doubles: RemoteGymDouble) -> AsyncIterator[Callable[[RemoteGymDouble], Any]]:
    """Servers that listen; gives a function that starts one again. What still hangs is cut at the end."""
    async with anyio.create_task_group() as group:
        for double in doubles:
            await group.start(double.run)

        async def again(double: RemoteGymDouble) -> None:
            await group.start(double.run)

        yield again
        group.cancel_scope.cancel()
