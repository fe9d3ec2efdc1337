"""``fleetbus auth``: keys per role, certificates, the configuration of a server that lets each role do its work, and other keys
while it runs."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import click
import msgspec

from fleetbus.auth.certificates import check_host
from fleetbus.auth.cluster_config import with_port
from fleetbus.auth.folder import AuthFolder, WriteResult, list_runs_with_keys, write_folder
from fleetbus.auth.renewal import RenewalStep, renew_certificates
from fleetbus.auth.rotation import KeyReplaced, revoke_key, rotate_key
from fleetbus.auth.websocket_config import parse_address
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import MAX_LANES
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.cli.output import json_option
from fleetbus_workers.cli.setup.auth_site import LOCAL_HOSTS, SITE_ROLES
from fleetbus_workers.cli.setup.auth_site import command as site
from fleetbus_workers.command.noted_operations import find_admin_key, note_rights
from fleetbus_workers.run_access.server_address import generate_worker_name

Change = Callable[[AuthFolder, str, str], KeyReplaced]


@click.group("auth", subcommand_metavar="init|site|rotate|revoke|renew")
def command() -> None:
    """Manage keys, certificates and rights on the bus."""


@command.command("init", short_help="Write keys, certificates and the server configuration")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option("--run", "runs", multiple=True, metavar="NAME", help="A run to allow; may be repeated [default]")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="A policy; may be repeated [default]")
@click.option(
    "--lanes", type=click.IntRange(1, MAX_LANES), default=16, metavar="N", help="The setting nats.lanes of the runs [16]"
)
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Name or address of the server, in addition to localhost")
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=825, metavar="N", help="Validity of the certificates in days [825]"
)
@click.option("--mounted-at", metavar="PATH", help="Where the server will find DIR, if not here (a volume, for example)")
@click.option("--route", "routes", multiple=True, metavar="HOST", help="A server of a cluster, or HOST:PORT; may be repeated")
@click.option(
    "--leaf", "leaves", multiple=True, metavar="HOST", help="A server that sites connect to (`auth site`); may be repeated"
)
@click.option(
    "--leaf-role",
    "leaf_roles",
    multiple=True,
    type=click.Choice(SITE_ROLES),
    default=("environment",),
    help="With --leaf: a role that sites may have; may be repeated [environment]",
)
@click.option(
    "--websocket", metavar="[HOST:]PORT", help="Listen for WebSocket (wss://) as well, on loopback unless HOST is given"
)
@json_option("what was written")
def init(
    folder: Path,
    runs: tuple[str, ...],
    policies: tuple[str, ...],
    lanes: int,
    hosts: tuple[str, ...],
    days: int,
    mounted_at: str | None,
    routes: tuple[str, ...],
    leaves: tuple[str, ...],
    leaf_roles: tuple[str, ...],
    websocket: str | None,
    as_json: bool,
) -> None:
    """Write into DIR an nkey per run and user, TLS certificates, and nats-server.conf with an account for each.

    Users: admin, operator, environment, inference, learner, recorder, gateway, monitor. Existing keys and certificates are
    kept, the configuration is replaced: to allow further runs, call it again with all of them. With --route for each
    server of a cluster it writes cluster.conf as well. Needs `pip install 'fleetbus[auth]'`.
    """
    try:
        plans = [plan_run(run, policies=policies or ("default",), lanes=lanes) for run in runs or ("default",)]
        _check_names(policies)
    except InvalidName as error:
        raise UserError(str(error)) from error
    between = [with_port(route) for route in routes]
    hosts += (*(route.rpartition(":")[0] for route in between), *leaves)
    for host in hosts:
        check_host(host)
    where = PurePosixPath(mounted_at) if mounted_at else None
    try:
        every = list(dict.fromkeys((*LOCAL_HOSTS, *hosts)))
        at_sites = list(dict.fromkeys(leaf_roles)) if leaves else []
        written = write_folder(
            AuthFolder(folder),
            plans,
            hosts=every,
            days=days,
            mounted_at=where,
            routes=between,
            leaf_roles=at_sites,
            websocket=_parse_websocket(websocket),
        )
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'fleetbus[auth]'") from error
    _show(written, as_json)


def _parse_websocket(address: str | None) -> str:
    try:
        return parse_address(address) if address else ""
    except ValueError as error:
        raise UserError(f"--websocket {error}") from error


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        check_name("name", name)


def _show(written: WriteResult, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(written).decode())
        return
    keys = f"new keys: {', '.join(written.keys)}" if written.keys else "all keys were there and stay"
    certificates = "new certificates" if written.certificates else "the certificates were there and stay"
    print(f"{written.folder}: {keys}; {certificates}")
    print(f"  server   nats-server -c {written.config} -js -sd FOLDER")
    print(f"  workers  --nats-auth {written.folder}, or FLEETBUS_NATS_AUTH; each needs ca.pem and the key RUN.ROLE.nk alone")


command.add_command(site)


STEPS = {
    "trust": "servers: SIGHUP; sites, if there are any: `fleetbus auth site`, and start their servers again; "
    "workers and viewers: start them again, one after another; then call this again",
    "show": "servers: SIGHUP; then call this again",
    "forget": "workers and viewers: with their next start; the renewal is complete",
}


@command.command("renew", short_help="Renew the certificates of a running deployment, step by step")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=825, metavar="N", help="Validity of the certificates in days [825]"
)
@json_option("the step that was taken")
def renew(folder: Path, days: int, as_json: bool) -> None:
    """Take the next of three steps: everybody trusts a new authority beside the old one (ca.pem), the servers show its
    certificate (server.pem, server-key.pem), the old authority goes (ca.pem).

    Between them bring the files to where they are used, as is printed. `fleetbus doctor --nats-auth DIR` says when the
    certificates end.
    """
    files = AuthFolder(folder)

    def tell(taken: RenewalStep) -> None:
        for run in list_runs_with_keys(str(folder)):
            author = generate_worker_name("auth")
            note_rights(folder, run, "renew", [taken.step], key=find_admin_key(files, run), author=author)
        if as_json:
            print(msgspec.json.encode(taken).decode(), flush=True)
            return
        print(f"{taken.step}: bring {' and '.join(taken.changed)} of {folder} to where they are used")
        print(f"  {STEPS[taken.step]}", flush=True)

    renew_certificates(files, days=days, tell=tell)


def _user_arguments(function: Callable[..., None]) -> Callable[..., None]:
    for add in (
        json_option("what was replaced"),
        click.option("--run", default="default", metavar="NAME", help="The run whose user it is [default]"),
        click.argument("user", metavar="USER"),
        click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR"),
    ):
        function = add(function)
    return function


@command.command("rotate", short_help="Give a user of a running deployment another key")
@_user_arguments
def rotate(folder: Path, user: str, run: str, as_json: bool) -> None:
    """Replace a user's key in DIR and in its nats-server.conf.

    Send each server SIGHUP then: it ends the connections of the old key. Workers that hold it go on when they are started
    with the new one; consumers keep their names, of an admin's key too. Users: see `fleetbus auth init --help`. What was
    done is noted in DIR; the next `fleetbus init` or `up` with DIR stores it in the run's log, where `fleetbus audit` shows it.
    """
    replaced = _record(folder, run, "rotate", rotate_key, user)
    _show_replaced(replaced, as_json)


@command.command("revoke", short_help="Withdraw the key of a user")
@_user_arguments
def revoke(folder: Path, user: str, run: str, as_json: bool) -> None:
    """Remove a user's key from DIR and from its nats-server.conf; `fleetbus auth init` makes another one.

    Send each server SIGHUP then: it ends the connections of that key.
    """
    replaced = _record(folder, run, "revoke", revoke_key, user)
    _show_replaced(replaced, as_json)


def _record(folder: Path, run: str, operation: str, change: Change, user: str) -> KeyReplaced:
    """Change a key, and note who did it under the admin's key of before."""
    files = AuthFolder(folder)
    key = find_admin_key(files, run)
    replaced = change(files, run, user)
    targets = [user, replaced.old, *([replaced.new] if replaced.key else [])]
    note_rights(folder, run, operation, targets, key=key, author=generate_worker_name("auth"))
    return replaced


def _show_replaced(replaced: KeyReplaced, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(replaced).decode())
        return
    print(f"{replaced.run}.{replaced.user}: {replaced.old} is no longer in {replaced.config}")
    print("  servers  kill -HUP PID, or kubectl: replace the secret and send SIGHUP; each ends the connections of the old key")
    if replaced.leaves:
        print("           then start each again, one after another: a leaf node of the old key stays connected until then")
        print("  sites    fleetbus auth site writes their folders anew; start their servers again with them")
    if replaced.key:
        print(f"  workers  start them again with {replaced.key} ({replaced.new})")
