"""The bytes of the remote-gym protocol on the server's side: requests read in both generations, answers written in one.

A request's boundary is the same in all repetitions of one call, and new for every call: it names the call.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus_workers.environment.adapters.remote_gym.wire import WireError, decode_response, read_content_type

_DATA = 'Content-Disposition: form-data; name="data"\r\nContent-Type: application/json; charset=utf-8'
_IMAGE = 'Content-Disposition: form-data; name="images"; filename="{number}.png"\r\nContent-Type: {mime}'


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``key`` names the logical call: all repetitions have the same."""

    fields: dict[str, Any]
    key: str


def read_request(content_type: str, body: bytes) -> Request:
    """The JSON part of a request, whose images are ignored. Raises `WireError` with what is wrong."""
    fields = decode_response(content_type, body).fields
    named = read_content_type(content_type)[1].encode()
    # A client that sends a fixed boundary, or bare JSON, says nothing about repetitions: every request of it is a new call.
    key = hashlib.sha256(named).hexdigest()[:32] if len(named) >= 24 else secrets.token_hex(16)
    return Request(fields=fields, key=key)


def write_answer(fields: dict[str, object], images: Sequence[bytes] = (), *, mime: str = "image/png") -> tuple[str, bytes]:
    """Content type and body of an answer. Files of every type are called ``.png``, as by the protocol's own servers."""
    boundary = f"gym_env_{secrets.token_hex(16)}"
    parts = [(_DATA, json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))]
    parts += [(_IMAGE.format(number=number, mime=mime), image) for number, image in enumerate(images)]
    body = b"".join(f"--{boundary}\r\n{head}\r\n\r\n".encode() + payload + b"\r\n" for head, payload in parts)
    return f'multipart/mixed; boundary="{boundary}"', body + f"--{boundary}--\r\n".encode()


__all__ = ["Request", "WireError", "read_request", "write_answer"]
