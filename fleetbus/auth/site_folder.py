"""The folder of a site: what its own nats-server and the workers beside it need, and nothing else of the deployment.

For workers it is like the folder of `fleetbus auth init`, with the keys of the site's roles alone. The site has an authority of
its own: with the certificate of the run's servers it could show itself as one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from fleetbus.auth.certificates import read_hosts
from fleetbus.auth.folder import AuthFolder, write_certificates
from fleetbus.auth.leaf_config import SiteUser, leaf_config, parse_leaf_roles
from fleetbus.bus.streams import RunPlan
from fleetbus.errors import UserError
from fleetbus.secret_files import lock_folder, replace_secret_file

HUB_AUTHORITY = "hub-ca.pem"


class SiteWritten(msgspec.Struct, frozen=True, kw_only=True):
    """``keys`` are those that the site holds, as ``RUN.ROLE``; ``certificates``: it has new ones."""

    folder: str
    config: str
    keys: tuple[str, ...]
    certificates: bool


def write_site(
    keys: AuthFolder,
    site: AuthFolder,
    plans: Sequence[RunPlan],
    roles: Sequence[str],
    *,
    hubs: Sequence[str],
    hosts: Sequence[str],
    days: int,
    mounted_at: PurePosixPath | None = None,
) -> SiteWritten:
    """Write the site's folder anew, but for its certificates; raises `UserError`. ``hubs`` are the run's servers as
    ``HOST:PORT``, ``hosts`` the names of the site's own, ``keys`` the folder that `fleetbus auth init` wrote."""
    _check(keys, site, plans, roles, hubs)
    users = [
        SiteUser(access=keys.access(plan), user=role, seed=keys.key(plan.run, role).read_text().strip())
        for plan in plans
        for role in roles
    ]
    try:
        site.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock_folder(site.path):
            certificates = write_certificates(site, hosts, days)
            replace_secret_file(site.path / HUB_AUTHORITY, keys.authority.read_bytes(), readable=True)
            for each in users:
                replace_secret_file(site.key(each.access.plan.run, each.user), each.seed.encode())
            where = mounted_at or PurePosixPath(site.path.absolute().as_posix())
            text = leaf_config(users, hubs, where, name=site.path.absolute().name, hub_authority=HUB_AUTHORITY)
            replace_secret_file(site.server_config, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or site.path}: {error.strerror}") from error
    held = tuple(f"{each.access.plan.run}.{each.user}" for each in users)
    return SiteWritten(folder=str(site.path), config=str(site.server_config), keys=held, certificates=certificates)


def _check(keys: AuthFolder, site: AuthFolder, plans: Sequence[RunPlan], roles: Sequence[str], hubs: Sequence[str]) -> None:
    """Name what is missing before anything is written."""
    if site.path.absolute() == keys.path.absolute() or (site.path / "cluster.conf").exists() or _has_admin(site):
        raise UserError(f"{site.path} has the keys of all roles: give a site a folder of its own")
    needed = [
        keys.authority,
        keys.server_certificate,
        keys.server_config,
        *(keys.key(plan.run, role) for plan in plans for role in roles),
    ]
    for file in needed:
        if not file.is_file():
            raise UserError(f"no {file}: fleetbus auth init writes the keys of a run")
    allowed = parse_leaf_roles(keys.server_config.read_text())
    for role in roles:
        if role not in allowed:
            what = f"lets sites be {', '.join(allowed)} and not {role}" if allowed else "listens for no sites"
            raise UserError(f"{keys.server_config} {what}: write it with `fleetbus auth init --leaf HOST --leaf-role {role}`")
    known = read_hosts(keys.server_certificate.read_bytes())
    for host in (hub.rpartition(":")[0] for hub in hubs):
        if host not in known:
            raise UserError(
                f"{keys.server_certificate} is for {', '.join(known)} and not for {host}: give a name that it has, or make "
                f"another one with `fleetbus auth init --leaf {host}`, after removing it, {keys.server_key.name} and "
                f"{keys.authority.name}"
            )


def _has_admin(site: AuthFolder) -> bool:
    return any(site.path.glob("*.admin.nk"))
