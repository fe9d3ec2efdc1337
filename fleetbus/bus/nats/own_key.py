"""The public key that a connection is known by at the server: of an nkey, or of a JWT's user. The seed stays where it is."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import msgspec

from fleetbus_schemas.message import UNREADABLE
from fleetbus_schemas.subjects import is_name


class _Claims(msgspec.Struct):
    sub: str = ""


def read_own_key(options: Mapping[str, object]) -> str:
    """By the options with which nats-py has connected; empty without a key. A user's name or a token is none."""
    if callable(token := options.get("user_jwt_cb")):
        return _read_subject(token())
    if seed := options.get("nkeys_seed_str"):
        return _make_public(str(seed).strip().encode())
    return ""


def _make_public(seed: bytes) -> str:
    import nkeys

    try:
        pair = nkeys.from_seed(bytearray(seed))
    except (nkeys.NkeysError, ValueError, IndexError):
        return ""
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
