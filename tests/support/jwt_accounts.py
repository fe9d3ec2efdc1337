"""A nats-server whose accounts are JWTs, as platforms have it: operator, accounts and users signed here, for tests alone."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nkeys

JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
UNLIMITED = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}


class Identity:
    """A key pair of one kind, and the JWTs that it signs."""

    def __init__(self, prefix: int) -> None:
        self.seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
        self.public = self._pair().public_key.decode()

    def sign(self, name: str, subject: str, kind: str, claims: Mapping[str, Any]) -> str:
        """A JWT about ``subject``."""
        body = {"jti": name, "iat": 1, "iss": self.public, "name": name, "sub": subject}
        body["nats"] = {"type": kind, "version": 2, **claims}
        parts = [_encode(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
        return ".".join([*parts, _encode(bytes(self._pair().sign(".".join(parts).encode())))])

    def _pair(self) -> Any:
        return nkeys.from_seed(bytearray(self.seed))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Platform:
    """An operator with a system account and one account that has JetStream."""

    def __init__(self) -> None:
        self._operator, self._account = Identity(nkeys.PREFIX_BYTE_OPERATOR), Identity(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = Identity(nkeys.PREFIX_BYTE_ACCOUNT)

    def config(self, lines: Sequence[str] = ()) -> str:
        """The configuration of a server, without its ports."""
        limits = {"limits": {**UNLIMITED, **JETSTREAM}}
        account = self._operator.sign("runs", self._account.public, "account", limits)
        system = self._operator.sign("system", self._system.public, "account", {"limits": UNLIMITED})
        operator = self._operator.sign("platform", self._operator.public, "operator", {"system_account": self._system.public})
        preload = f"{self._account.public}: {account}, {self._system.public}: {system}"
        trusted = [f"operator: {operator}", f"system_account: {self._system.public}", "resolver: MEMORY"]
        return "\n".join([*trusted, f"resolver_preload: {{{preload}}}", *lines])

    def write_credentials(self, file: Path, **rights: Any) -> str:
        """A file as ``nsc generate creds`` writes it; returns the seed in it."""
        user = Identity(nkeys.PREFIX_BYTE_USER)
        claims = {"subs": -1, "data": -1, "payload": -1, **rights}
        jwt = self._account.sign("worker", user.public, "user", claims)
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        file.chmod(0o600)
        return user.seed.decode()
