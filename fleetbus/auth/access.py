"""Credentials of a client: its key, the authority that it trusts, and the user that it is. Raises `UserError`."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from fleetbus.auth.consumer_names import reader_names, rename_consumers
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.keys import public_key
from fleetbus.auth.permissions import NARROW_READERS, get_user
from fleetbus.bus.streams import RunPlan
from fleetbus.errors import UserError
from fleetbus_schemas.channels import ROLES


class Access(TypedDict, total=False):
    """Arguments of `fleetbus.bus.nats.connect`; empty where nothing is asked."""

    nkey_seed: Path
    credentials: Path
    tls: ssl.SSLContext
    user: str
    narrow: bool
    plan_on_server: Callable[[RunPlan], RunPlan]
    readers: tuple[str, ...]


def is_credentials(auth: str) -> bool:
    """True if the setting ``nats.auth`` names a file of credentials, and not a folder of keys."""
    return Path(auth).expanduser().is_file() or auth.endswith(".creds")


def build_access(role: str, folder: str, run: str) -> Access:
    """Access of a role, or of a command of that name, to a run. ``folder`` is the setting ``nats.auth``; empty: without keys
    and TLS. It may be a file of credentials, too: then the server's accounts are of another issuer, and all of the run is in
    the account of that user (docs/decisions/0240-credentials-of-other-issuers.md)."""
    if not folder:
        return Access()
    if is_credentials(folder):
        from fleetbus.bus.nats.credentials import check_credentials  # nats-py, which the rest of this does without

        return Access(credentials=check_credentials(Path(folder).expanduser()))
    user, files = get_user(role), AuthFolder(Path(folder).expanduser())
    key = files.key(run, user)
    for file, what in ((files.authority, "certificate authority"), (key, f"key of the user {user} of run {run}")):
        if not file.is_file():
            others = [other for other in ROLES if files.key(run, other).is_file()]
            held = f"it holds {' and '.join(others)}, which may not do this" if others and file == key else ""
            hint = held or "--nats-auth takes a folder that `fleetbus auth init` wrote"
            raise UserError(f"no {what} at {file}: {hint}")
    try:
        context = ssl.create_default_context(cafile=files.authority)
        public_key(key)
    except ssl.SSLError as error:
        raise UserError(f"{files.authority} contains no certificate") from error
    except OSError as error:
        raise UserError(f"cannot read {error.filename or files.path}: {error.strerror}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    access = Access(nkey_seed=key, tls=context, user=user, narrow=user in NARROW_READERS)
    if names := reader_names(run, user, key.read_bytes().strip()):
        access["readers"] = names
    if user == "admin":
        access["plan_on_server"] = lambda plan: rename_consumers(plan, files.names(plan))
    return access
