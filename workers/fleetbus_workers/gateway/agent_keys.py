"""Keys of agents' sessions: each names its episode and proves that this run made it, so that any replica knows it by itself.

A key is ``fbs-EPISODE.EXPIRY.PROOF``: the deadline of the episode in Unix seconds (hexadecimal), and a keyed hash of all of it.
A session's calls are made with that one; its reward is posted with another, which begins with ``fbr-``. What makes keys is
derived from the token that opens sessions, or lies in the run's folder; nothing of either enters the log. Who has a key may try
tokens against it, on a machine of its own: the token is long, and each try takes a tenth of a second and 32 MiB.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.agent.sessions import NO_REWARD_KEY, REWARD_PREFIX, UNKNOWN_KEY, KeyRefused

PREFIX = "fbs-"
SECRET_FILE = "agents-secret"
SECRET_BYTES = 32
MIN_TOKEN_CHARACTERS, MIN_TOKEN_ALPHABET = 24, 10
"""Least of a token: its characters, and how many of them differ."""

EXPIRED_KEY = "this key has expired"


class SessionKeys:
    """Makes and reads the keys of one run."""

    def __init__(self, secret: bytes, run: str) -> None:
        self._secret = hmac.digest(secret, f"fleetbus agents of {run}".encode(), "sha256")

    def make(self, episode: str, deadline_ns: int, prefix: str = PREFIX) -> str:
        """The key of an episode's session, which ends with it."""
        said = f"{prefix}{episode}.{deadline_ns // 10**9:x}"
        return f"{said}.{self._prove(said)}"

    def read(self, key: str, now_ns: int, prefix: str = PREFIX) -> str:
        """The episode that a key is of. Raises `KeyRefused` for one that is not of this run, or of another kind, and one that
        has expired."""
        said, _, proof = key.rpartition(".")
        if not key.startswith(prefix) or not hmac.compare_digest(proof.encode("utf-8", "replace"), self._prove(said).encode()):
            raise KeyRefused(NO_REWARD_KEY if prefix == REWARD_PREFIX else UNKNOWN_KEY)
        episode, _, expiry = said.removeprefix(prefix).rpartition(".")
        if int(expiry, 16) * 10**9 <= now_ns:
            raise KeyRefused(EXPIRED_KEY)
        return episode

    def _prove(self, said: str) -> str:
        return hmac.digest(self._secret, said.encode("utf-8", "surrogatepass"), "sha256").hex()[:40]


def check_token(token: str) -> None:
    """Raises `UserError` for a token that can be guessed; an empty one is none."""
    if token and (len(token) < MIN_TOKEN_CHARACTERS or len(set(token)) < MIN_TOKEN_ALPHABET):
        raise UserError(
            f"AGENTS_TOKEN can be guessed: give at least {MIN_TOKEN_CHARACTERS} random characters, as python -c "
            "'import secrets; print(secrets.token_urlsafe())' prints"
        )


def read_secret(token: str, run: RunSettings) -> bytes:
    """The secret that the keys of a run are made with: the token where there is one, which all replicas have; else a file that
    those on this machine share, made by the first of them. Takes a tenth of a second. Raises `UserError` for a token that can
    be guessed, `OSError` where the file cannot be written."""
    check_token(token)
    if token:
        salt = f"fleetbus agents of {run.name}".encode()
        return hashlib.scrypt(token.encode(), salt=salt, n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=SECRET_BYTES)
    file = run_folder(run).path / SECRET_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{file}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, file)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    secret = file.read_bytes()
    if len(secret) != SECRET_BYTES:  # anybody could guess the rest
        raise OSError(f"{file} is not whole: remove it")
    return secret
