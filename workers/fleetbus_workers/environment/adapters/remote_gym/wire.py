"""The bytes of the remote-gym protocol: one JSON part and images, as multipart over HTTP, in both generations of its servers.

A request is encoded once and repeated with the same boundary, by which a server can tell a repetition from a new call. Both
functions that touch image data are slow and belong in a thread. Above it is `adapters.remote_gym.client`.
"""

import json
import re
from collections.abc import Mapping
from email.message import Message
from functools import lru_cache
from typing import Any

import msgspec

from fleetbus_workers.environment.images.observation import EncodedImage, encode_image_file
from fleetbus_workers.serving.bounded_json import check_values

MAX_BODY_BYTES = 32 << 20
MAX_PARTS = 512
MAX_PART_HEADERS = 16
MAX_PART_HEAD_BYTES = 2048
MAX_TYPE_CHARACTERS = 1024
"""Of a Content-Type: what reads the rules of mail takes the square of its length."""
_FORM = "form-data; name="
_PLAIN_MULTIPART = re.compile(r'multipart/[a-z-]+; ?boundary="?([A-Za-z0-9_-]{1,70})"?')
"""How everybody writes it; what is written otherwise is read by the rules of mail, which take ten times as long."""


class WireError(ValueError):
    """A body that cannot be read."""


class DecodedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response: its JSON object and its image parts as they came, in order."""

    fields: dict[str, Any]
    images: tuple[bytes, ...] = ()


def encode_request(fields: Mapping[str, object], boundary: str) -> bytes:
    """The body of a request without images. The part has a type and no file name: both generations of servers read that."""
    payload = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    head = f'--{boundary}\r\nContent-Disposition: {_FORM}"data"\r\nContent-Type: application/json; charset=utf-8\r\n\r\n'
    return head.encode() + payload + f"\r\n--{boundary}--\r\n".encode()


def build_request_headers(boundary: str) -> dict[str, str]:
    return {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}


def decode_response(content_type: str, body: bytes) -> DecodedResponse:
    """Read a multipart body of either generation, or bare JSON. Raises `WireError`."""
    kind, boundary = read_content_type(content_type)
    if kind == "application/json":
        return DecodedResponse(fields=_object(body))
    if not kind.startswith("multipart/") or not boundary:
        raise WireError(f"an answer of the type {content_type!r} is neither multipart nor JSON")
    fields: dict[str, object] | None = None
    images: list[bytes] = []
    for kind, name, payload in _parts(boundary, body):
        if kind.startswith("image/"):
            images.append(payload)
        elif kind == "application/json" or (name == "data" and fields is None):
            fields = _object(payload)
    if fields is None:
        raise WireError("the answer has no JSON part")
    return DecodedResponse(fields=fields, images=tuple(images))


def read_content_type(content_type: str) -> tuple[str, str]:
    """The media type, and the boundary or nothing. Raises `WireError`."""
    if len(content_type) > MAX_TYPE_CHARACTERS:
        raise WireError(f"a Content-Type of more than {MAX_TYPE_CHARACTERS} characters")
    if (plain := _PLAIN_MULTIPART.fullmatch(content_type)) is not None:
        return "multipart/mixed", plain[1]
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    return header.get_content_type(), boundary if isinstance(boundary, str) else ""


def _parts(boundary: str, body: bytes) -> list[tuple[str, str, bytes]]:
    """Media type, field name and payload of each part. Parts and headers are counted before any is looked at: the work is a
    few passes over the body, however it is cut."""
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    if not boundary or body.count(delimiter) > MAX_PARTS + 1:
        raise WireError(f"the answer is no multipart body of at most {MAX_PARTS} parts")
    _, *sections = (b"\r\n" + body).split(b"\r\n" + delimiter)
    if not sections or not sections[-1].startswith(b"--"):
        raise WireError("the answer is no multipart body: it does not end with its boundary")
    return [_part(section) for section in sections[:-1]]


def _part(section: bytes) -> tuple[str, str, bytes]:
    padding, found, rest = section.partition(b"\r\n")
    if not found or padding.strip(b" \t"):
        raise WireError("the answer is no multipart body: its boundary does not stand alone")
    head, _, payload = (b"", b"", rest[2:]) if rest.startswith(b"\r\n") else rest.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n", MAX_PART_HEADERS) if head else []
    if len(head) > MAX_PART_HEAD_BYTES or len(lines) > MAX_PART_HEADERS:
        raise WireError(f"a part has more than {MAX_PART_HEADERS} headers or {MAX_PART_HEAD_BYTES} bytes of them")
    headers: dict[str, str] = {}
    for line in lines:
        name, found, value = line.partition(b":")
        if not found or not name.strip() or name != name.strip():
            raise WireError("the answer is no multipart body: a part has a line that is no header")
        headers.setdefault(name.decode("latin-1").lower(), value.strip().decode("latin-1"))
    return *_read_part_head(headers.get("content-type"), headers.get("content-disposition", "")), payload


@lru_cache(maxsize=64)
def _read_part_head(content_type: str | None, disposition: str) -> tuple[str, str]:
    """Media type and field name: the same two for all parts of a client."""
    headers = Message()
    headers["Content-Disposition"] = disposition
    if content_type is not None:
        headers["Content-Type"] = content_type
    kind = headers.get_content_type() if content_type is not None else ""
    return kind, str(headers.get_param("name", "", "Content-Disposition"))


def _object(payload: bytes) -> dict[str, Any]:
    try:
        check_values(payload)
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
