"""The folder that ``fleetbus auth init`` writes: a key per run and user, certificates, and the server's configuration.

A worker's machine needs ``ca.pem`` and the key of its own role in its run, the server's machine what begins with ``server`` and
the configuration. Files with secrets are readable by their owner alone; the names of durable consumers are such a secret.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from fleetbus.auth.certificates import lets_into_cluster, make_certificates
from fleetbus.auth.cluster_config import cluster_config
from fleetbus.auth.consumer_names import COUNTED, reader_names, secret_names
from fleetbus.auth.keys import create_seed, public_key
from fleetbus.auth.leaf_config import leaf_listener
from fleetbus.auth.server_config import RunAccess, server_config
from fleetbus.auth.websocket_config import websocket_listener
from fleetbus.bus.streams import RunPlan
from fleetbus.errors import UserError
from fleetbus.secret_files import create_secret_file, lock_folder, replace_secret_file
from fleetbus_schemas.channels import ROLES

PASSWORD_BYTES = 24


class AuthFolder(msgspec.Struct, frozen=True):
    """The files below ``path``."""

    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca.pem"

    @property
    def server_certificate(self) -> Path:
        return self.path / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.path / "server-key.pem"

    @property
    def server_config(self) -> Path:
        return self.path / "nats-server.conf"

    @property
    def cluster_config(self) -> Path:
        return self.path / "cluster.conf"

    @property
    def route_password(self) -> Path:
        return self.path / "route-password"

    def key(self, run: str, user: str) -> Path:
        return self.path / f"{run}.{user}.nk"

    def consumer_secret(self, run: str) -> Path:
        """The names of durable consumers are made from this: there once the admin's key, which they were made from, was
        replaced."""
        return self.path / f"{run}.consumers"

    def names(self, plan: RunPlan) -> dict[str, str]:
        """The plan's consumers by name, and what the server calls them; raises `UserError`."""
        secret = self.consumer_secret(plan.run)
        try:
            return secret_names(plan, (secret if secret.is_file() else self.key(plan.run, "admin")).read_bytes().strip())
        except OSError as error:
            raise UserError(f"cannot read the key {error.filename}: {error.strerror}") from error

    def access(self, plan: RunPlan) -> RunAccess:
        """The facts that the server needs of a run whose keys are here; raises `UserError`."""
        return RunAccess(
            plan=plan,
            names=self.names(plan),
            readers={user: reader_names(plan.run, user, self.key(plan.run, user).read_bytes().strip()) for user in COUNTED},
            public_keys={user: public_key(self.key(plan.run, user)) for user in ROLES},
        )


def list_runs_with_keys(folder: str, user: str = "admin") -> list[str]:
    """The runs whose key of this user is in a folder, by name."""
    ending = f".{user}.nk"
    return sorted(file.name.removesuffix(ending) for file in Path(folder).expanduser().glob(f"*{ending}"))


class WriteResult(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were new in the folder; those that existed stayed as they were, except the server's configuration."""

    folder: str
    config: str
    keys: tuple[str, ...]
    certificates: bool


def write_folder(
    folder: AuthFolder,
    plans: Sequence[RunPlan],
    *,
    hosts: Sequence[str],
    days: int,
    mounted_at: PurePosixPath | None = None,
    routes: Sequence[str] = (),
    leaf_roles: Sequence[str] = (),
    websocket: str = "",
) -> WriteResult:
    """Make keys and certificates that are missing, and the server's configuration for these runs; raises `UserError`.

    ``mounted_at`` is where the server will find the folder, if not here; ``routes`` are a cluster's servers, ``HOST:PORT``;
    ``leaf_roles``: sites may connect leaf nodes with the keys of these. ``websocket``: where the servers listen for WebSocket.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock_folder(folder.path):
            users = [(plan.run, user) for plan in plans for user in ROLES]
            new_keys = [f"{run}.{user}" for run, user in users if create_secret_file(folder.key(run, user), create_seed())]
            certificates = write_certificates(folder, hosts, days)
            where = mounted_at or PurePosixPath(folder.path.absolute().as_posix())
            if routes:
                _write_cluster(folder, routes, where)
            listeners = leaf_listener(where, leaf_roles) if leaf_roles else []
            listeners += websocket_listener(where, websocket) if websocket else []
            runs = [msgspec.structs.replace(folder.access(plan), leaf_roles=leaf_roles) for plan in plans]
            text = server_config(runs, where, cluster=bool(routes), listeners=listeners)
            replace_secret_file(folder.server_config, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder.path}: {error.strerror}") from error
    return WriteResult(
        folder=str(folder.path), config=str(folder.server_config), keys=tuple(new_keys), certificates=certificates
    )


def write_certificates(folder: AuthFolder, hosts: Sequence[str], days: int) -> bool:
    """All three or none: a part of them would not fit the rest."""
    files = (folder.authority, folder.server_certificate, folder.server_key)
    there = [file.exists() for file in files]
    if all(there):
        return False
    if any(there):
        missing = ", ".join(file.name for file, exists in zip(files, there, strict=True) if not exists)
        raise UserError(f"{folder.path} lacks {missing}: restore it, or remove the other certificates to make new ones")
    made = make_certificates(hosts, days=days)
    for file, content in zip(files, (made.authority, made.server, made.server_key), strict=True):
        create_secret_file(file, content, readable=file != folder.server_key)
    return True


def _write_cluster(folder: AuthFolder, routes: Sequence[str], where: PurePosixPath) -> None:
    if not lets_into_cluster(folder.server_certificate.read_bytes()):
        raise UserError(
            f"{folder.server_certificate} is of an older `auth init` and lets no server into a cluster: remove it, "
            f"{folder.server_key.name} and {folder.authority.name} to make new ones"
        )
    create_secret_file(folder.route_password, secrets.token_hex(PASSWORD_BYTES).encode())
    password = folder.route_password.read_text().strip()
    replace_secret_file(folder.cluster_config, cluster_config(routes, password, where).encode())
