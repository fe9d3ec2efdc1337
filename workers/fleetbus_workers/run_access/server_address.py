"""Finds the server of a run: the one that the settings name, or the one that a running `up` started on this machine."""

import os
import re
import secrets
import socket

from fleetbus.config.run_folder import RunFolder, run_folder
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.up.address import Address, read_address
from fleetbus_workers.up.lock import is_held


def generate_worker_name(role: str) -> str:
    """A name that no other worker of the run has or had: role, host, process id, and a random part, because a container that
    is started again has the same host and the same process id."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:64] or "host"
    return f"{role}-{host}-{os.getpid()}-{secrets.token_hex(2)}"


def resolve_server_url(configuration: Configuration) -> str:
    """The server to connect to: the one that was named, or the one that a running `up` of the same run started here."""
    if url := configuration.nats.url or find_local_server_url(run_folder(configuration.run)):
        return url
    raise UserError(
        f"no server for run {configuration.run.name}: give --nats nats://HOST:4222, or start `fleetbus up` in this folder first"
    )


def find_local_server_url(folder: RunFolder) -> str:
    """The URL of the server that a running `up` started, else empty."""
    address = read_server_address(folder)
    return address.url if address else ""


def read_server_address(folder: RunFolder) -> Address | None:
    """Server address written by a running `up`, else None: an `up` that was killed leaves a stale file."""
    if not folder.server.is_file() or (folder.lock.is_file() and not is_held(folder.lock)):
        return None
    return read_address(folder.server)
