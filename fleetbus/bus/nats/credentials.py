"""Credentials files of servers whose accounts are JWTs: a user's JWT and seed in one file, as nsc and Synadia Cloud write them.

nats-py reads the file anew for every connection, so that a renewed one is used from then on. A file of another form it would
read for ever. Above it are `server_context` and `fleetbus.auth.access`.
"""

from __future__ import annotations

from pathlib import Path

from fleetbus.errors import UserError

MAX_BYTES = 64 << 10
_MARKS = (b"-----BEGIN NATS USER JWT-----\n", b"-----BEGIN USER NKEY SEED-----\n")


def check_credentials(file: Path) -> Path:
    """The file, which holds a user's JWT and seed. Raises `UserError`."""
    import nkeys

    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES)
    except OSError as error:
        raise UserError(f"the credentials {file} cannot be read: {error.strerror}") from error
    parts = [content.partition(mark)[2].partition(b"\n") for mark in _MARKS]
    try:
        if not all(line and end for line, end, _ in parts):
            raise ValueError
        nkeys.from_seed(bytearray(parts[1][0].strip())).wipe()
    except (nkeys.NkeysError, ValueError, IndexError):
        raise UserError(
            f"{file} holds no credentials: give a file with a user's JWT and seed, as `nsc generate creds` writes it"
        ) from None
    return file
