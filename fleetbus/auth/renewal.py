"""Renews the certificates of a running deployment in three steps, none of which ends a connection.

Everybody trusts the next authority before a server shows its certificate, and nobody shows the old certificate when the old
authority goes. What is next is kept in one file until the last step; which step that is follows from the other files, so that a
call that was cut off can be made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from fleetbus.auth.certificates import Certificates, make_certificates, read_hosts
from fleetbus.auth.folder import AuthFolder
from fleetbus.errors import UserError
from fleetbus.secret_files import create_secret_file, lock_folder, replace_secret_file
from fleetbus_schemas.message import UNREADABLE

NEXT = "certificates.next"


class RenewalStep(msgspec.Struct, frozen=True, kw_only=True):
    """``changed`` are the files to bring to where they are used before the next step."""

    step: Literal["trust", "show", "forget"]
    changed: tuple[str, ...]


def renew_certificates(folder: AuthFolder, *, days: int) -> RenewalStep:
    """Take the next step. The first makes an authority and a server's certificate for the hosts of the present one, valid for
    ``days``. Raises `UserError`."""
    for file in (folder.authority, folder.server_certificate, folder.server_key):
        if not file.is_file():
            raise UserError(f"no {file}: fleetbus auth init writes the certificates")
    with lock_folder(folder.path):
        return _take_step(folder, days)


def _take_step(folder: AuthFolder, days: int) -> RenewalStep:
    authority, certificate, key = folder.authority, folder.server_certificate, folder.server_key
    kept = folder.path / NEXT
    following = _read_or_make(kept, certificate, days)
    if following.authority not in authority.read_bytes():
        replace_secret_file(authority, authority.read_bytes().rstrip() + b"\n" + following.authority, readable=True)
        return RenewalStep(step="trust", changed=(authority.name,))
    if certificate.read_bytes() != following.server:
        replace_secret_file(key, following.server_key)
        replace_secret_file(certificate, following.server, readable=True)
        return RenewalStep(step="show", changed=(certificate.name, key.name))
    replace_secret_file(authority, following.authority, readable=True)
    kept.unlink()
    return RenewalStep(step="forget", changed=(authority.name,))


def _read_or_make(kept: Path, certificate: Path, days: int) -> Certificates:
    if not kept.is_file():
        made = make_certificates(read_hosts(certificate.read_bytes()), days=days)
        create_secret_file(kept, msgspec.json.encode(made))
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Certificates)
    except UNREADABLE as error:
        raise UserError(f"{kept} is not whole ({error}): remove it to begin the renewal anew") from error
