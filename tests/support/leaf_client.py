"""A connection in the protocol of leaf nodes with the key of one user, as nobody's server would make it: nothing that it sends
was held against rights before. It looks to tests like `tests.support.bare_client.BareClient`.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import nkeys
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.auth.access import build_access
from fleetbus.auth.permissions import build_inbox_prefix
from tests.support.bare_client import ANSWER_SECONDS

LINE_BYTES = 1 << 20
CUT = "cut off"


class Heard:
    """A message; ``headers`` as they came."""

    def __init__(self, subject: str, data: bytes, headers: bytes) -> None:
        self.subject = subject
        self.data = data
        self.headers = headers


class LeafClient:
    """``violations`` are the server's words for what it refused."""

    def __init__(self, user: str, stream: anyio.abc.ByteStream) -> None:
        self.user = user
        self.client = self
        self.violations: list[str] = []
        self.headers = b""
        """What each message is sent with, as on the wire."""
        self.inbox = f"{build_inbox_prefix(user)}.{secrets.token_hex(6)}"
        self._stream = stream
        self._reading = BufferedByteReceiveStream(stream)
        self._heard: dict[str, anyio.Event] = {}
        self._messages: dict[str, Heard] = {}
        self._pongs = anyio.Event()
        self._writing = anyio.Lock()

    async def introduce(self, seed: bytes | None, **said: Any) -> None:
        """Say who it is, and ``said``; the server sends its nonce first. Without a seed it has no key."""
        info = json.loads((await self._line()).removeprefix(b"INFO "))
        words = {"server_id": secrets.token_hex(8), "name": "nobody", "headers": True, "version": "2.15.0"} | said
        if seed is not None:
            pair = nkeys.from_seed(bytearray(seed))
            signature = base64.urlsafe_b64encode(pair.sign(info["nonce"].encode())).rstrip(b"=").decode()
            words |= {"nkey": pair.public_key.decode(), "sig": signature}
        await self._write(f"CONNECT {json.dumps(words)}")

    async def follow(self) -> None:
        """Take in what the server sends, until it is cancelled. A leaf node that does what it may not is cut off."""
        while True:
            try:
                verb, _, rest = (await self._line()).partition(b" ")
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
                self.violations.append(CUT)
                self._pongs.set()
                return
            match verb.upper():
                case b"PING":
                    await self._write("PONG")
                case b"PONG":
                    self._pongs.set()
                case b"-ERR":
                    self.violations.append(rest.decode())
                case b"LMSG" | b"HMSG":
                    await self._take(rest.decode().split(), verb.upper() == b"HMSG")

    async def send(self, subject: str, payload: bytes = b"", *, reply: str = "") -> None:
        """Without waiting for anything."""
        words = " ".join(filter(None, (subject, reply)))
        if self.headers:
            size = len(self.headers)
            await self._write(f"HMSG {words} {size} {size + len(payload)}", self.headers + payload)
        else:
            await self._write(f"LMSG {words} {len(payload)}", payload)

    async def settle(self) -> None:
        """Until the server has taken in what was sent before."""
        self._pongs = anyio.Event()
        with suppress(anyio.BrokenResourceError):
            await self._write("PING")
        if CUT in self.violations:
            return
        with anyio.fail_after(30):
            await self._pongs.wait()

    async def ask(self, subject: str, payload: bytes = b"") -> Heard | None:
        """The answer; None where the server refuses, nobody answers, or no answer comes."""
        inbox, known = f"{self.inbox}.{secrets.token_hex(4)}", len(self.violations)
        subscription = await self.subscribe(inbox)
        await self.send(subject, payload, reply=inbox)
        await self.settle()
        if len(self.violations) > known:
            return None
        with anyio.move_on_after(ANSWER_SECONDS):
            answer = await subscription.next_msg(timeout=None)
            return None if answer.headers.startswith(b"NATS/1.0 503") else answer
        return None

    async def subscribe(self, subject: str) -> LeafSubscription:
        self._heard[subject] = anyio.Event()
        await self._write(f"LS+ {subject}")
        return LeafSubscription(self, subject)

    async def first(self, pattern: str) -> Heard:
        await self._heard[pattern].wait()
        return self._messages[pattern]

    async def end(self, pattern: str) -> None:
        with suppress(anyio.BrokenResourceError):
            await self._write(f"LS- {pattern}")

    async def _take(self, words: list[str], has_headers: bool) -> None:
        size, header = int(words[-1]), int(words[-2]) if has_headers else 0
        body = await self._reading.receive_exactly(size + 2)
        heard = Heard(words[0], body[header:-2], body[:header])
        for pattern, event in self._heard.items():
            if pattern == words[0] or (pattern[-1] in "*>" and words[0].startswith(pattern[:-1])):
                self._messages.setdefault(pattern, heard)
                event.set()

    async def _line(self) -> bytes:
        return await self._reading.receive_until(b"\r\n", LINE_BYTES)

    async def _write(self, line: str, payload: bytes | None = None) -> None:
        async with self._writing:
            await self._stream.send(line.encode() + b"\r\n" + (b"" if payload is None else payload + b"\r\n"))


class LeafSubscription:
    """The first message on a subject."""

    def __init__(self, client: LeafClient, pattern: str) -> None:
        self._client = client
        self._pattern = pattern

    async def next_msg(self, timeout: Any) -> Heard:
        return await self._client.first(self._pattern)

    async def unsubscribe(self) -> None:
        await self._client.end(self._pattern)


@asynccontextmanager
async def leaf_client(
    folder: Path, port: int, user: str, run: str, *, has_key: bool = True, **said: Any
) -> AsyncIterator[LeafClient]:
    """Connected for the length of the block to the server that listens for leaf nodes on ``port``, with a key of ``folder``;
    ``said`` stands in its greeting, too."""
    access = build_access(user, str(folder), run)
    async with (
        await anyio.connect_tcp(
            "127.0.0.1", port, tls=True, ssl_context=access["tls"], tls_standard_compatible=False
        ) as stream,
        anyio.create_task_group() as tasks,
    ):
        client = LeafClient(user, stream)
        await client.introduce(access["nkey_seed"].read_bytes().strip() if has_key else None, **said)
        tasks.start_soon(client.follow)
        await client.settle()
        yield client
        tasks.cancel_scope.cancel()
