"""``fleetbus auth site``: the folder of a site whose workers reach the run's servers through a nats-server of their own."""

from pathlib import Path, PurePosixPath

import click
import msgspec

from fleetbus.auth.certificates import check_host
from fleetbus.auth.cluster_config import with_port
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.auth.site_folder import SiteWritten, write_site
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas.channels import ROLES
from fleetbus_schemas.subjects import InvalidName
from fleetbus_workers.cli.output import json_option

SITE_ROLES = [role for role in ROLES if role != "admin"]
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@click.command("site", short_help="Write the folder of a site with a nats-server of its own")
@click.argument("keys", type=click.Path(path_type=Path, file_okay=False), metavar="KEYS")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--hub", "hubs", multiple=True, required=True, metavar="HOST", help="A server of the run, or HOST:PORT; may be repeated"
)
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="The site's server, in addition to localhost")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(SITE_ROLES),
    default=("environment",),
    help="A role that works there; may be repeated [environment]",
)
@click.option("--run", "runs", multiple=True, metavar="NAME", help="A run; may be repeated [default]")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="As for `auth init` [default]")
@click.option("--lanes", type=click.IntRange(1, 10_240), default=16, metavar="N", help="As for `auth init` [16]")
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=825, metavar="N", help="Validity of the certificates in days [825]"
)
@click.option("--mounted-at", metavar="PATH", help="Where the site's server will find DIR, if not here")
@json_option("what was written")
def command(
    keys: Path,
    folder: Path,
    hubs: tuple[str, ...],
    hosts: tuple[str, ...],
    roles: tuple[str, ...],
    runs: tuple[str, ...],
    policies: tuple[str, ...],
    lanes: int,
    days: int,
    mounted_at: str | None,
    as_json: bool,
) -> None:
    """Write into DIR what a site needs: a server's configuration (a leaf node without a store), certificates of its own, and
    the keys of its roles from KEYS, which `fleetbus auth init --leaf` wrote.

    Bring DIR to the site. Called again it takes over replaced keys and a renewed authority; then start the site's server again.
    """
    for host in hosts:
        check_host(host)
    try:
        plans = [plan_run(run, policies=policies or ("default",), lanes=lanes) for run in runs or ("default",)]
    except InvalidName as error:
        raise UserError(str(error)) from error
    try:
        written = write_site(
            AuthFolder(keys),
            AuthFolder(folder),
            plans,
            list(dict.fromkeys(roles)),
            hubs=[with_port(hub, LEAF_PORT) for hub in hubs],
            hosts=list(dict.fromkeys((*LOCAL_HOSTS, *hosts))),
            days=days,
            mounted_at=PurePosixPath(mounted_at) if mounted_at else None,
        )
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'fleetbus[auth]'") from error
    _show(written, as_json)


def _show(written: SiteWritten, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(written).decode())
        return
    certificates = "new certificates" if written.certificates else "the certificates were there and stay"
    print(f"{written.folder}: the keys {', '.join(written.keys)}; {certificates}")
    print(f"  server   nats-server -c {written.config} -a HOST")
    print(f"  workers  --nats nats://HOST:4222 --nats-auth {written.folder}")
