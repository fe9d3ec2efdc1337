"""Notes who removed a run or changed its keys, where there is no log to write to, and stores the notes once its admin connects.

They lie beside the keys, on a server with keys, and else in the folder of runs: who does such a thing can write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbus.auth.access import is_credentials
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.keys import public_key
from fleetbus.config.load import strip_credentials
from fleetbus_schemas import Subjects

if TYPE_CHECKING:
    from fleetbus.bus.base import LogBus
    from fleetbus.config.settings import Configuration


def note_rights(folder: Path, run: str, operation: str, targets: Sequence[str], *, key: str, author: str) -> None:
    """Note a change of a run's keys or certificates in the folder of keys; ``key`` is the admin's public one of then. Raises
    `UserError`."""
    from fleetbus.log.operations import describe_operation, note_operation, now_ns

    note_operation(folder, run, key, describe_operation(operation, targets, author, at_ns=now_ns()))


def note_purge(configuration: Configuration, run: str, *, author: str) -> None:
    """Note that a run is removed, for the next one of that name on the same server. Raises `UserError`."""
    from fleetbus.log.operations import describe_operation, note_operation, now_ns

    folder, key = _find_folder(configuration, run)
    message = describe_operation("purge", [run], author, at_ns=now_ns())
    note_operation(folder, run, key, message, strip_credentials(configuration.nats.url))


def find_admin_key(folder: AuthFolder, run: str) -> str:
    """The public key of a run's admin; empty where its key is kept elsewhere."""
    key = folder.key(run, "admin")
    return public_key(key) if key.is_file() else ""


async def store_notes(bus: LogBus, configuration: Configuration) -> int:
    """Store what is noted about the configured run; returns how many entries."""
    from fleetbus.log.operations import store_noted

    run, stored = configuration.run.name, 0
    for folder in dict.fromkeys((_find_folder(configuration, run)[0], _runs_folder(configuration))):
        stored += await store_noted(bus, Subjects(run), folder, strip_credentials(configuration.nats.url))
    return stored


def _find_folder(configuration: Configuration, run: str) -> tuple[Path, str]:
    """The folder with the notes of a run, and the public key that its admin has there."""
    auth = configuration.nats.auth
    if auth and not is_credentials(auth):
        folder = AuthFolder(Path(auth).expanduser())
        return folder.path, find_admin_key(folder, run)
    return _runs_folder(configuration), ""


def _runs_folder(configuration: Configuration) -> Path:
    return Path(configuration.run.folder).expanduser()
