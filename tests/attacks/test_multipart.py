"""A client of the gym gateway, or a remote gym, sends a body that costs far more than its bytes: it is refused at once."""

from __future__ import annotations

import time

import pytest

from fleetbus_workers.environment.adapters.remote_gym.wire import MAX_PARTS, WireError, decode_response, encode_request

TYPE = 'multipart/form-data; boundary="b"'
SIZE = 12_800_000
LIMIT_SECONDS = 1.5
"""Of the loop; the attack took 32 s."""


def repeated(piece: bytes) -> bytes:
    return piece * (SIZE // len(piece))


BODIES = {
    "tiny parts": repeated(b"--b\r\n\r\n\r\n") + b"--b--\r\n",
    "empty parts": repeated(b"--b\r\n") + b"--b--\r\n",
    "headers": b"--b\r\n" + repeated(b"a: b\r\n") + b"\r\nx\r\n--b--\r\n",
    "one header": b"--b\r\na: " + repeated(b"x") + b"\r\n\r\nx\r\n--b--\r\n",
    "almost boundaries": b"--b\r\n\r\n" + repeated(b"\r\n--") + b"\r\n--b--\r\n",
    "line ends": b"--b\r\n\r\n" + repeated(b"\r") + b"\r\n--b--\r\n",
    "values": b'--b\r\nContent-Type: application/json\r\n\r\n{"a": [' + repeated(b"[],") + b"[]]}\r\n--b--\r\n",
    "depth": b'--b\r\nContent-Type: application/json\r\n\r\n{"a": ' + repeated(b"[") + b"\r\n--b--\r\n",
    "no end": repeated(b"--b\r\n\r\nx\r\n"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_in_a_moment(name: str) -> None:
    began = time.process_time()
    with pytest.raises(WireError):
        decode_response(TYPE, BODIES[name])
    assert time.process_time() - began < LIMIT_SECONDS


def test_as_many_parts_as_are_allowed_are_read() -> None:
    image = b"--b\r\nContent-Type: image/png\r\n\r\n\x89PNG\r\n\r\n--x\r\n"
    data = b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n{"x": 1}\r\n'
    read = decode_response(TYPE, data + image * (MAX_PARTS - 1) + b"--b--\r\n")
    assert read.fields == {"x": 1} and set(read.images) == {b"\x89PNG\r\n\r\n--x"} and len(read.images) == MAX_PARTS - 1
    with pytest.raises(WireError, match="parts"):
        decode_response(TYPE, data + image * MAX_PARTS + b"--b--\r\n")


@pytest.mark.parametrize("boundary", ["b", "gym_env_" + "0" * 32, "with space", "-"])
def test_what_was_encoded_is_decoded(boundary: str) -> None:
    read = decode_response(f'multipart/form-data; boundary="{boundary}"', encode_request({"a": "\r\n--c\r\n"}, boundary))
    assert read.fields == {"a": "\r\n--c\r\n"}
