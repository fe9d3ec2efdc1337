"""A server of VAGEN's protocol that answers each call with the same bytes at once: no server lets its client go faster.

``python benchmarks/null_server.py PORT SIZE``: a text, or an image of so many pixels a side that was encoded beforehand.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop
from PIL import Image

from benchmarks.image_environment import build_image
from fleetbus_workers.environment.images.png import encode_png
from fleetbus_workers.gateway.gym_wire import write_answer

END_OF_HEAD = b"\r\n\r\n"
LENGTH = b"content-length: "


def build_response(size: int) -> bytes:
    """Head and body of the answer to every call."""
    info = {"terminated": False, "truncated": False}
    fields: dict[str, object] = {
        "session_id": "null",
        "obs": "<image>" if size else "turn 1",
        "reward": 0.0,
        "done": False,
        "info": info,
    }
    images = [encode_png(Image.fromarray(build_image(size, 1)))] if size else []
    content_type, body = write_answer(fields, images)
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class NullProtocol(asyncio.Protocol):
    def __init__(self, response: bytes) -> None:
        self._response = response
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(END_OF_HEAD)
        if not found:
            return
        stated = head.lower().partition(LENGTH)[2].partition(b"\r\n")[0]
        if len(body) >= int(stated or 0):
            self._received = b""
            self._transport.write(self._response)  # type: ignore[attr-defined]


async def main(port: int, size: int) -> None:
    response = build_response(size)
    server = await asyncio.get_running_loop().create_server(lambda: NullProtocol(response), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
