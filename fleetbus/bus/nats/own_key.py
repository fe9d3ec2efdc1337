"""The public key that a connection is known by at the server: of an nkey, or of a JWT's user; and the seed of an nkey."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE
from fleetbus_schemas.names import is_name


class _Claims(msgspec.Struct):
    sub: str = ""


def read_own_key(options: Mapping[str, object]) -> str:
    """By the options with which nats-py has connected; empty without a key. A user's name or a token is none."""
    if callable(token := options.get("user_jwt_cb")):
        return _read_subject(token())
    if seed := options.get("nkeys_seed_str"):
        return _make_public(str(seed).encode())
    return ""


def read_seed(file: Path) -> str:
    """The seed of a key that `fleetbus auth init` wrote. Raises `UserError` if there is none."""
    import nkeys

    try:
        seed = file.read_bytes().strip()
        nkeys.from_seed(bytearray(seed)).wipe()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (nkeys.NkeysError, ValueError, IndexError):
        raise UserError(f"{file} contains no nkey seed: write it again (fleetbus auth init), or give another key") from None
    return seed.decode()


def _make_public(seed: bytes) -> str:
    import nkeys

    pair = nkeys.from_seed(bytearray(seed))
    public: bytes = pair.public_key
    pair.wipe()
    return public.decode()


def _read_subject(token: object) -> str:
    """The user of a JWT, which the server has checked."""
    if not isinstance(token, (bytes, bytearray)):
        return ""
    part = bytes(token).split(b".")[1:2]
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(part[0] + b"=" * (-len(part[0]) % 4)), type=_Claims)
    except (IndexError, ValueError, *UNREADABLE):
        return ""
    return claims.sub if is_name(claims.sub) else ""
