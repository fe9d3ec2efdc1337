"""Frames between the worker and a process inside: four bytes of length, then JSON. What comes in is not trusted."""

import json
import os
import socket
import struct
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from fleetbus_workers.serving.bounded_json import check_values

MAX_SENT_BYTES = 16 << 20
"""Largest frame to a process."""

MAX_RECEIVED_BYTES = 1 << 20
"""Largest frame from one, unless its owner takes larger ones: parsing 15 MB holds the loop for longer than a lease lasts."""

IN_THREAD_BYTES = 64 << 10
"""Larger frames are parsed in a thread."""

_HEADER = struct.Struct("!I")


class ChannelBroken(Exception):
    """The process sent something that is no frame, or nothing more."""


class ChannelEnded(ChannelBroken):
    """The process sends nothing more, most likely because it is gone."""


def _parse(data: bytes) -> object:
    check_values(data)
    return json.loads(data)


class Channel:
    """The worker's end of a socket; it does not block. ``limit`` is the largest frame that is taken in, in bytes."""

    def __init__(self, connection: socket.socket, *, limit: int = MAX_RECEIVED_BYTES) -> None:
        connection.setblocking(False)
        self._limit = limit
        self._socket = connection
        self._received = bytearray()
        self.silent = True
        """Whether nothing was received yet."""

    async def send(self, message: dict[str, object]) -> None:
        """Send a frame; raises `ChannelBroken` if it is too large or the process is gone."""
        payload = json.dumps(message, default=str).encode()
        if len(payload) > MAX_SENT_BYTES:
            raise ChannelBroken(f"{len(payload)} bytes for the process exceed {MAX_SENT_BYTES}")
        rest = memoryview(_HEADER.pack(len(payload)) + payload)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as error:
                raise ChannelEnded(str(error)) from error

    async def receive(self) -> dict[str, Any]:
        """The next frame; raises `ChannelBroken` if there is none, or none that can be read. Others get their turn in between,
        however many frames wait."""
        await anyio.lowlevel.checkpoint()
        length = _HEADER.unpack(await self._read(_HEADER.size))[0]
        if length > self._limit:
            raise ChannelBroken(f"a message of {length} bytes exceeds {self._limit}")
        try:
            data = await self._read(length)
            message = await anyio.to_thread.run_sync(_parse, data) if length > IN_THREAD_BYTES else _parse(data)
        except (ValueError, RecursionError) as error:
            raise ChannelBroken(f"not a message: {error}") from error
        if not isinstance(message, dict):
            raise ChannelBroken("not a message")
        return message

    async def receive_descriptors(self, count: int) -> list[int]:
        """Open files that come with one byte, before any frame; raises `ChannelEnded` unless there are so many."""
        await anyio.wait_readable(self._socket)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count)
        except OSError as error:
            raise ChannelEnded(str(error)) from error
        if len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelEnded("it ended without an answer")
        return descriptors

    async def _read(self, count: int) -> bytes:
        while len(self._received) < count:
            try:
                chunk = self._socket.recv(1 << 16)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except OSError as error:
                raise ChannelEnded(str(error)) from error
            if not chunk:
                raise ChannelEnded("it ended without an answer")
            self.silent = False
            self._received += chunk
            await anyio.lowlevel.checkpoint()
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def close(self) -> None:
        self._socket.close()
