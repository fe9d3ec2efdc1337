"""Replaces or withdraws one key of a running deployment: in the folder, and in the servers' configuration.

The servers take the new configuration upon SIGHUP, and end the connections of the old key then. Consumers keep their names:
what they were made from, the first key of the admin, is kept beside the keys (`AuthFolder.consumer_secret`). The names that a
monitor reads under are made from its key and change with it.
Source: docs/decisions/0199-keys-and-certificates-replaced-while-it-runs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetbus.auth.consumer_names import reader_names
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.keys import create_seed, public_key
from fleetbus.auth.leaf_config import parse_leaf_roles
from fleetbus.errors import UserError
from fleetbus.secret_files import create_secret_file, lock_folder, replace_secret_file
from fleetbus_schemas.channels import ROLES

NEXT = ".next"
"""Ending of a key that the configuration may name already, while its file is not yet in its place."""


class KeyReplaced(msgspec.Struct, frozen=True, kw_only=True):
    """Public keys. ``key`` is the file with the new seed, empty if the key was withdrawn. ``leaves``: leaf nodes may have
    connected with it, which a reload leaves connected."""

    run: str
    user: str
    old: str
    new: str
    key: str
    config: str
    leaves: bool = False


def rotate_key(folder: AuthFolder, run: str, user: str) -> KeyReplaced:
    """Give a user another key; raises `UserError` with nothing changed. Called again after a crash, it goes on."""
    _find_key(folder, run, user)
    with lock_folder(folder.path):
        return _rotate(folder, run, user)


def _rotate(folder: AuthFolder, run: str, user: str) -> KeyReplaced:
    key = _find_key(folder, run, user)
    following = key.with_name(key.name + NEXT)
    create_secret_file(following, create_seed())
    old, new = public_key(key), public_key(following)
    names = [reader_names(run, user, file.read_bytes().strip()) for file in (key, following)]
    if user == "admin":
        create_secret_file(folder.consumer_secret(run), key.read_bytes())
    _replace_in_config(folder, old, new, dict(zip(*names, strict=True)))
    following.replace(key)
    leaves = user in parse_leaf_roles(folder.server_config.read_text())
    return KeyReplaced(run=run, user=user, old=old, new=new, key=str(key), config=str(folder.server_config), leaves=leaves)


def revoke_key(folder: AuthFolder, run: str, user: str) -> KeyReplaced:
    """Let nobody in as this user, until ``auth init`` gives it a key again. Raises `UserError`."""
    if user == "admin":
        raise UserError("a run needs its admin: fleetbus auth rotate replaces the key")
    _find_key(folder, run, user)
    with lock_folder(folder.path):
        replaced = _rotate(folder, run, user)
        Path(replaced.key).unlink()
    return msgspec.structs.replace(replaced, key="")


def _find_key(folder: AuthFolder, run: str, user: str) -> Path:
    if user not in ROLES:
        raise UserError(f"there is no user {user!r}: choose one of {', '.join(ROLES)}")
    key = folder.key(run, user)
    if not key.is_file():
        raise UserError(f"no key at {key}: fleetbus auth init writes the keys of a run")
    if not folder.server_config.is_file():
        raise UserError(f"no {folder.server_config}: keys are replaced where the servers' configuration is written")
    return key


def _replace_in_config(folder: AuthFolder, old: str, new: str, names: Mapping[str, str]) -> None:
    text = folder.server_config.read_text()
    if old in text:
        for replaced, name in {old: new, **names}.items():
            text = text.replace(replaced, name)
        replace_secret_file(folder.server_config, text.encode())
    elif new not in text:
        raise UserError(f"{folder.server_config} does not know this key: write it again with fleetbus auth init, with all runs")
