"""Credentials files of servers whose accounts are JWTs: a user's JWT and seed in one file, as nsc and Synadia Cloud write them.

The file is read anew for every connection, so that a renewed one is used from then on; while it is gone or half written, a
connection fails and is tried again. nats-py, given the file, would read one of another form for ever, or never connect again.
Above it are `server_context` and the bus.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from fleetbus.errors import UserError

MAX_BYTES = 64 << 10
_MARKS = (b"-----BEGIN NATS USER JWT-----\n", b"-----BEGIN USER NKEY SEED-----\n")


class SignIn(TypedDict):
    """Options of nats-py."""

    user_jwt_cb: Callable[[], bytes]
    signature_cb: Callable[[str], bytes]


def sign_in(file: Path) -> SignIn:
    """The options of a connection by what is in the file each time. Its calls raise `OSError`, which nats-py takes for a failed
    try."""

    held = b""

    def sign(nonce: str) -> bytes:
        nonlocal held
        try:
            held, seed = _read(file)
        except ValueError as error:
            raise OSError(f"{file} holds no credentials") from error
        return _sign(seed, nonce)

    return SignIn(user_jwt_cb=lambda: held, signature_cb=sign)  # nats-py signs first; both are of one reading


def check_credentials(file: Path) -> Path:
    """The file, which holds a user's JWT and seed. Raises `UserError`."""
    try:
        _read(file)
    except OSError as error:
        raise UserError(f"the credentials {file} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UserError(
            f"{file} holds no credentials: give a file with a user's JWT and seed, as `nsc generate creds` writes it"
        ) from None
    return file


def _read(file: Path) -> tuple[bytes, bytes]:
    """JWT and seed; raises `OSError` or `ValueError`."""
    import nkeys

    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES)
    parts = [content.partition(mark)[2].partition(b"\n") for mark in _MARKS]
    if not all(line and end for line, end, _ in parts):
        raise ValueError
    token, seed = (line.strip() for line, _, _ in parts)
    try:
        nkeys.from_seed(bytearray(seed)).wipe()
    except (nkeys.NkeysError, IndexError) as error:
        raise ValueError from error
    return token, seed


def _sign(seed: bytes, nonce: str) -> bytes:
    import nkeys

    pair = nkeys.from_seed(bytearray(seed))
    signed = base64.b64encode(pair.sign(nonce.encode()))
    pair.wipe()
    return signed
