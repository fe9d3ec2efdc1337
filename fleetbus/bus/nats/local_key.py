"""The key of a server that `fleetbus up` started, found by what the server says when it greets.

Such a server is called after the folder in which its key lies (`fleetbus.auth.local_key` writes both), so that whoever may read
that folder needs no option to connect, from any folder and by any address of this machine; nobody else gets in. Servers of
others have other names: of them nothing is read, and nothing is said to them.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import anyio
import msgspec

from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE

KEY_FILE = "local.nk"
"""No file of `fleetbus auth init` is called so: a server that lies about its folder gets no signature of another key."""

RETRY_SECONDS = 0.05
MOST_BYTES = 64 << 10
"""Of a greeting."""

_PREFIX = "fleetbus-local:"
_KEY_BYTES = 256
_PORT = 4222


class _Greeting(msgspec.Struct):
    """The part of INFO that matters here."""

    server_name: str = ""
    auth_required: bool = False


def name_server(folder: Path) -> str:
    """The name of a server whose key lies in ``folder``, without spaces, which no server's name may have."""
    return _PREFIX + quote(str(folder.absolute()))


async def read_local_key(url: str, *, give_up_at: float) -> str:
    """The seed of the key for the server at ``url``; empty where none is needed, as for servers of other machines, open ones,
    and those that want something else. Waits for a server that does not listen yet until the loop's time is ``give_up_at``, and
    for its greeting as long as the caller lets it. Raises `UserError` if this user may not read the key.
    """
    address = find_loopback(url)
    if address is None or (greeting := await _read_greeting(*address, give_up_at)) is None:
        return ""
    if not greeting.auth_required or not greeting.server_name.startswith(_PREFIX):
        return ""
    return _read_key(Path(unquote(greeting.server_name.removeprefix(_PREFIX))) / KEY_FILE, url)


def find_loopback(url: str) -> tuple[str, int] | None:
    """Host and port of the server that ``url`` names on this machine; None for others, and where the URL says who connects."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname or "", parts.port or _PORT
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or several servers
        return None
    return (host, port) if is_here and parts.scheme == "nats" and "@" not in parts.netloc else None


async def _read_greeting(host: str, port: int, give_up_at: float) -> _Greeting | None:
    """None from what does not greet as a nats-server does; the connection itself tells the reason."""
    while True:
        try:
            async with await anyio.connect_tcp(host, port) as stream:
                return await _receive_greeting(stream)
        except OSError:
            if anyio.current_time() > give_up_at:
                return None
        await anyio.sleep(RETRY_SECONDS)


async def _receive_greeting(stream: anyio.abc.ByteStream) -> _Greeting | None:
    received = b""
    try:
        while b"\n" not in received and len(received) < MOST_BYTES:
            received += await stream.receive()
        verb, _, content = received.partition(b"\n")[0].partition(b" ")
        return msgspec.json.decode(content, type=_Greeting) if verb == b"INFO" else None
    except (anyio.EndOfStream, anyio.BrokenResourceError, *UNREADABLE):
        return None


def _read_key(file: Path, url: str) -> str:
    """Another user's server may name any folder: of a link or a pipe nothing is read."""
    import nkeys

    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            seed = opened.read(_KEY_BYTES).strip() if is_file else b""
        nkeys.from_seed(bytearray(seed)).wipe()
    except OSError as error:
        raise UserError(
            f"the NATS server at {strip_credentials(url)} lets in who can read {file} ({error.strerror}): run this as the user "
            "and on the machine that started it, or begin a run with keys for others (fleetbus auth init, --nats-auth)"
        ) from error
    except (nkeys.NkeysError, ValueError, IndexError):
        raise UserError(f"{file} contains no nkey seed: remove it, and start again what runs its NATS server") from None
    return seed.decode()
