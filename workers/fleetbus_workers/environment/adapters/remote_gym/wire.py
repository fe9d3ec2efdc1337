"""The bytes of the remote-gym protocol: one JSON part and images, as multipart over HTTP, in both generations of its servers.

A request is encoded once and repeated with the same boundary, by which a server can tell a repetition from a new call. Both
functions that touch image data are slow and belong in a thread. Above it is `remote_gym_client`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.message import Message
from typing import TYPE_CHECKING, Any, cast

import msgspec
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser

from fleetbus_workers.environment.images.observation import EncodedImage, encode_image_file

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_BODY_BYTES = 64 << 20
_FORM = "form-data; name="


class WireError(ValueError):
    """A body that cannot be read."""


class DecodedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response: its JSON object and its image parts as they came, in order."""

    fields: dict[str, Any]
    images: tuple[bytes, ...] = ()


def encode_request(fields: Mapping[str, Any], boundary: str) -> bytes:
    """The body of a request without images. The part has a type and no file name: both generations of servers read that."""
    payload = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    head = f'--{boundary}\r\nContent-Disposition: {_FORM}"data"\r\nContent-Type: application/json; charset=utf-8\r\n\r\n'
    return head.encode() + payload + f"\r\n--{boundary}--\r\n".encode()


def build_request_headers(boundary: str) -> dict[str, str]:
    return {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}


def decode_response(content_type: str, body: bytes) -> DecodedResponse:
    """Read a multipart body of either generation, or bare JSON. Raises `WireError`."""
    header = Message()
    header["Content-Type"] = content_type
    if header.get_content_type() == "application/json":
        return DecodedResponse(fields=_object(body))
    boundary = header.get_param("boundary")
    if header.get_content_maintype() != "multipart" or not isinstance(boundary, str):
        raise WireError(f"an answer of the type {content_type!r} is neither multipart nor JSON")
    fields: dict[str, Any] | None = None
    images: list[bytes] = []
    for kind, name, payload in _parts(boundary, body):
        if kind.startswith("image/"):
            images.append(payload)
        elif kind == "application/json" or (name == "data" and fields is None):
            fields = _object(payload)
    if fields is None:
        raise WireError("the answer has no JSON part")
    return DecodedResponse(fields=fields, images=tuple(images))


def _parts(boundary: str, body: bytes) -> list[tuple[str, str, bytes]]:
    """Media type, field name and payload of each part."""
    parts: list[tuple[str, str, bytes]] = []
    headers: Message = Message()
    name, value, payload = bytearray(), bytearray(), bytearray()

    def on_part_begin() -> None:
        nonlocal headers
        headers = Message()
        payload.clear()

    def on_header_end() -> None:
        headers[name.decode("latin-1")] = value.decode("latin-1")
        name.clear()
        value.clear()

    def on_part_end() -> None:
        kind = headers.get_content_type() if "Content-Type" in headers else ""
        field = headers.get_param("name", "", "Content-Disposition")
        parts.append((kind, str(field), bytes(payload)))

    def into(buffer: bytearray) -> Any:
        return lambda data, start, end: buffer.extend(data[start:end])

    callbacks: dict[str, Any] = {
        "on_part_begin": on_part_begin,
        "on_part_data": into(payload),
        "on_part_end": on_part_end,
        "on_header_field": into(name),
        "on_header_value": into(value),
        "on_header_end": on_header_end,
    }
    try:
        parser = MultipartParser(boundary.encode("latin-1"), cast("MultipartCallbacks", callbacks))
        parser.write(body)
        parser.finalize()
    except (MultipartParseError, UnicodeEncodeError) as error:
        raise WireError(f"the response is not a multipart body: {error}") from error
    return parts


def _object(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the JSON part cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise WireError("the JSON part is not an object")
    return value


def encode_image(data: bytes) -> EncodedImage:
    """An image part as RGB. One that is RGB already keeps its bytes, any other becomes a PNG. Raises `WireError`."""
    try:
        return encode_image_file(data)
    except ValueError as error:
        raise WireError(str(error)) from error
