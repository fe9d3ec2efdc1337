"""Contexts of the nats command line: a server and who connects to it, by a name in place of a URL.

``nats context add`` writes them, for all programs of a user. Command lines, configurations and logs have the name alone: URL,
user, password and token are read here when a connection is made, by each process. Above it is the connection.
See docs/decisions/0240-credentials-of-other-issuers.md.
"""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.bus.nats.credentials import check_credentials, sign_in
from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE

SUFFIX = ".json"
UNSUPPORTED = ("nsc", "socks_proxy", "jetstream_domain", "jetstream_api_prefix", "inbox_prefix", "user_jwt", "user_seed")
"""Keys by which a context says what is not done here: a connection without them would be another one than was meant."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ServerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a context that a connection is made of. ``creds``, ``nkey``, ``cert``, ``key`` and ``ca`` are files."""

    url: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    tls_first: bool = False


def read_server_context(name: str) -> ServerContext | None:
    """The context that is called ``name``; None if there is none, as for every URL. Raises `UserError` for one that cannot be
    read, has no server or wants what is not done here."""
    file = find_context_file(name)
    if file is None:
        return None
    try:
        content = file.read_bytes()
        context = msgspec.json.decode(content, type=ServerContext)
        found = msgspec.json.decode(content, type=dict[str, Any])
    except OSError as error:
        raise UserError(f"the NATS context {name} cannot be read: {error.strerror}: check {file}") from error
    except UNREADABLE:  # whose text may quote a password
        raise UserError(f"the NATS context {name} cannot be read: {file} is no JSON as `nats context add` writes it") from None
    if unsupported := [key for key in UNSUPPORTED if found.get(key)]:
        raise UserError(f"the NATS context {name} uses {unsupported[0]}, which is not supported: put url and creds into {file}")
    if not context.url:
        raise UserError(f"the NATS context {name} names no server: put url into {file}")
    return context


def find_context_file(name: str) -> Path | None:
    """The file of the context that is called ``name``; None if there is none."""
    file = get_context_folder() / f"{name}{SUFFIX}"
    return file if _NAME.fullmatch(name) and file.is_file() else None


def list_context_files(name: str) -> list[Path]:
    """The files of a context that hold secrets: itself, and those that it names."""
    file = find_context_file(name)
    context = read_server_context(name) if file is not None else None
    if file is None or context is None:
        return []
    return [file, *(_expand(each) for each in (context.creds, context.nkey, context.key) if each)]


def get_context_folder() -> Path:
    """The folder in which the nats command line keeps contexts."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nats/context"


def resolve_url(url: str) -> str:
    """The server's URL, where ``url`` may be the name of a context. Raises `UserError`."""
    context = read_server_context(url)
    return context.url if context is not None else url


def build_options(name: str, context: ServerContext, *, identified: bool = False) -> dict[str, Any]:
    """nats-py's options for a context; ``identified``: who connects is known already, and only certificates are of use. Raises
    `UserError` for a file that is not there or not what it should be."""
    options: dict[str, Any] = {}
    if not identified:
        options = {each: value for each in ("user", "password", "token") if (value := getattr(context, each))}
        if context.creds:
            options |= sign_in(check_credentials(_expand(context.creds)))
        elif context.nkey:
            options["nkeys_seed"] = str(_expand(context.nkey))
            if not os.access(options["nkeys_seed"], os.R_OK):
                raise UserError(f"the NATS context {name} names a key that cannot be read: {context.nkey}")
    if context.cert or context.ca or context.tls_first:
        options["tls"] = _build_tls(name, context)
    return options | {"tls_handshake_first": True} if context.tls_first else options


def _build_tls(name: str, context: ServerContext) -> ssl.SSLContext:
    try:
        built = ssl.create_default_context(cafile=str(_expand(context.ca)) if context.ca else None)
        if context.cert:
            built.load_cert_chain(_expand(context.cert), _expand(context.key) if context.key else None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(each for each in (context.ca, context.cert, context.key) if each)
        raise UserError(f"the NATS context {name} names certificates that cannot be read ({files}): {error}") from error
    built.minimum_version = ssl.TLSVersion.TLSv1_2
    return built


def _expand(file: str) -> Path:
    return Path(os.path.expandvars(file)).expanduser()


def describe_missing_context(url: str) -> str:
    """The contexts that there are, for whoever may have meant one of them; empty otherwise."""
    if not _NAME.fullmatch(url) or not (names := sorted(file.stem for file in get_context_folder().glob(f"*{SUFFIX}"))):
        return ""
    return f"; it is no NATS context either, these are: {', '.join(names)}"
