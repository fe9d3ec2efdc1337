"""The key of a server that is started for one user: made in the server's folder, which it is called after; the only way in.

Without it every user of the machine could read, change and purge the log, because loopback is everybody's
(docs/decisions/0232-a-key-for-the-server-of-up.md).
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from fleetbus.auth.keys import create_seed, public_key
from fleetbus.bus.nats.local_key import KEY_FILE, name_server
from fleetbus.errors import UserError
from fleetbus.files import create_private_folder
from fleetbus.secret_files import create_secret_file, replace_secret_file

TIMEOUT_SECONDS = 10
"""For a client to say who it is; one that was held up connects again."""


def write_local_config(store: Path, account: str = "") -> Path:
    """The configuration of a server on ``store`` that lets in who may read the key in there, which is made if there is none.
    It leads into ``account``, by default that of a server without accounts. Raises `UserError`."""
    key, file = store / KEY_FILE, store / "local.conf"
    try:
        create_private_folder(store)
        _remove_planted(key)
        create_secret_file(key, create_seed())
        users = [{"nkey": public_key(key)}]
        authorization: dict[str, Any] = {"timeout": TIMEOUT_SECONDS}
        content = {"server_name": name_server(store), "authorization": authorization}
        if account:
            content["accounts"] = {account: {"jetstream": "enabled", "users": users}}
        else:
            authorization["users"] = users
        replace_secret_file(file, json.dumps(content).encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or store}: {error.strerror}") from error
    return file


def _remove_planted(key: Path) -> None:
    """A folder that was open to everybody may hold a key of somebody else's making, or a link to one."""
    if not os.path.lexists(key):
        return
    found = key.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), key.parent.stat().st_uid):
        key.unlink()
