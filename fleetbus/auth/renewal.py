"""Renews the certificates of a running deployment in three steps, none of which ends a connection.

Everybody trusts the next authority before a server shows its certificate, and nobody shows the old certificate when the old
authority goes. What is next is kept in one file until the last step; which step was taken follows from the other files, and one
that nobody was told of is told again before the next is taken, so that a call that was cut off can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from fleetbus.auth.certificates import Certificates, make_certificates, read_hosts
from fleetbus.auth.folder import AuthFolder
from fleetbus.errors import UserError
from fleetbus.secret_files import create_secret_file, lock_folder, replace_secret_file
from fleetbus_schemas.message import UNREADABLE

NEXT = "certificates.next"
ORDER = ("", "trust", "show", "forget")


class RenewalStep(msgspec.Struct, frozen=True, kw_only=True):
    """``changed`` are the files to bring to where they are used before the next step."""

    step: Literal["trust", "show", "forget"]
    changed: tuple[str, ...]


class _Renewal(Certificates, frozen=True, kw_only=True):
    """The next certificates; ``told`` is the last step that somebody was told of."""

    told: Literal["", "trust", "show", "forget"] = ""


def renew_certificates(
    folder: AuthFolder, *, days: int, tell: Callable[[RenewalStep], None] = lambda step: None
) -> RenewalStep:
    """Take the next step, and ``tell`` of it: until that has returned, the step is not over, and the next call tells of it
    instead of taking another. The first makes an authority and a server's certificate for the hosts of the present one, valid
    for ``days``. Raises `UserError`, and what ``tell`` raises."""
    for file in (folder.authority, folder.server_certificate, folder.server_key):
        if not file.is_file():
            raise UserError(f"no {file}: fleetbus auth init writes the certificates")
    kept = folder.path / NEXT
    with lock_folder(folder.path):
        following = _read_or_make(kept, folder.server_certificate, days)
        step = _find_taken(folder, following)
        if step is None or ORDER.index(step.step) <= ORDER.index(following.told):
            step = _take_step(folder, following, step)
    tell(step)
    with lock_folder(folder.path):
        if step.step == "forget":
            kept.unlink(missing_ok=True)
        else:
            replace_secret_file(kept, msgspec.json.encode(msgspec.structs.replace(following, told=step.step)))
    return step


def _find_taken(folder: AuthFolder, following: Certificates) -> RenewalStep | None:
    """The last step whose files are all there."""
    authorities = folder.authority.read_bytes()
    if following.authority not in authorities:
        return None
    if folder.server_certificate.read_bytes() != following.server:
        return RenewalStep(step="trust", changed=(folder.authority.name,))
    if authorities != following.authority:
        return RenewalStep(step="show", changed=(folder.server_certificate.name, folder.server_key.name))
    return RenewalStep(step="forget", changed=(folder.authority.name,))


def _take_step(folder: AuthFolder, following: Certificates, taken: RenewalStep | None) -> RenewalStep:
    authority = folder.authority
    if taken is None:
        replace_secret_file(authority, authority.read_bytes().rstrip() + b"\n" + following.authority, readable=True)
    elif taken.step == "trust":
        replace_secret_file(folder.server_key, following.server_key)
        replace_secret_file(folder.server_certificate, following.server, readable=True)
    else:
        replace_secret_file(authority, following.authority, readable=True)
    step = _find_taken(folder, following)
    assert step is not None
    return step


def _read_or_make(kept: Path, certificate: Path, days: int) -> _Renewal:
    if not kept.is_file():
        made = make_certificates(read_hosts(certificate.read_bytes()), days=days)
        create_secret_file(kept, msgspec.json.encode(made))
    try:
        return msgspec.json.decode(kept.read_bytes(), type=_Renewal)
    except UNREADABLE as error:
        raise UserError(f"{kept} is not whole ({error}): remove it to begin the renewal anew") from error
