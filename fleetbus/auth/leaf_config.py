"""Configures leaf nodes: where a run's servers listen for them, and the server of a site, which has no store. Pure.

A site's server holds the accounts of the roles that work there, by the names that they have at the run's servers, and a
connection for each to the account of that name, with that role's key. So a site can do what its keys can do, and nothing else
crosses (docs/decisions/0224-leaf-nodes-hold-the-keys-of-their-site.md).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from fleetbus.auth.permissions import build_rights
from fleetbus.auth.server_config import GREETING_SECONDS, RunAccess, account_of, build_permissions, limit_connections
from fleetbus.auth.shared_values import format_sharing

LEAF_PORT = 7422
ROLES_OF_SITES = "# roles of sites: "

PING_SECONDS = 5
PINGS_MISSED = 2
"""A link that is cut without a word is closed after at most (missed + 1) times the interval, and connected anew from then on;
by default that takes six minutes, in which workers wait for answers that cannot come."""

RECONNECT_SECONDS = 1

QUIET_TRIES = 60
"""Of so many failed tries to connect anew one is logged; the server's own choice is every one."""

INFO_SECONDS = 10
"""For the handshake and the first line of the run's server; its own second is short for a link between continents."""


class SiteUser(msgspec.Struct, frozen=True, kw_only=True):
    """One role of one run at a site. ``seed`` is its key's."""

    access: RunAccess
    user: str
    seed: str


def leaf_listener(folder: PurePosixPath, roles: Sequence[str]) -> list[str]:
    """Lines for the configuration of a run's servers. ``folder`` is where they find the certificates; ``roles`` are those that
    sites may have (`RunAccess.leaf_roles`). TLS alone, from the first byte. Sites learn of no other address than they were
    given: those of pods lead nowhere from outside."""
    return [
        "leafnodes {",
        f"  {ROLES_OF_SITES}{' '.join(roles)}",
        f'  listen: "0.0.0.0:{LEAF_PORT}"',
        "  no_advertise: true",
        "  tls {",
        *_certificates(folder),
        "    handshake_first: true",
        "    timeout: 5",
        "  }",
        "}",
    ]


def parse_leaf_roles(text: str) -> list[str]:
    """The roles that sites may have, by the configuration of a run's servers; empty if they listen for no site."""
    found = re.search(rf"^  {ROLES_OF_SITES}(.*)$", text, flags=re.MULTILINE)
    return found[1].split() if found else []


def leaf_config(users: Sequence[SiteUser], hubs: Sequence[str], folder: PurePosixPath, *, name: str, hub_authority: str) -> str:
    """The text of the site's file, with the seeds of its keys. ``hubs`` are the run's servers as ``HOST:PORT``, ``folder`` is
    where the site's server finds its certificates and ``hub_authority``, the file with the authority of the run's servers."""
    urls = [f"tls://{hub}" for hub in hubs]
    accounts = {account_of(each.access.plan.run, each.user): _build_account(each) for each in users}
    return "\n".join(
        [
            "# Written by `fleetbus auth site`; start with: nats-server -c THIS_FILE [-a HOST] [-p PORT]",
            f"server_name: {json.dumps(name)}",
            'host: "127.0.0.1"',
            f'ping_interval: "{PING_SECONDS}s"',
            f"ping_max: {PINGS_MISSED}",
            f"reconnect_error_reports: {QUIET_TRIES}",
            "tls {",
            *_certificates(folder),
            f'  handshake_first: "{GREETING_SECONDS}s"',
            "  timeout: 5",
            "}",
            "authorization { timeout: 5 }",
            "accounts {",
            *format_sharing(accounts),
            "}",
            "leafnodes {",
            f"  reconnect: {RECONNECT_SECONDS}",
            "  remotes: [",
            *_remotes(users, urls, str(folder / hub_authority)),
            "  ]",
            "}",
            "",
        ]
    )


def _certificates(folder: PurePosixPath) -> list[str]:
    files = {"cert_file": "server.pem", "key_file": "server-key.pem"}
    return [f"    {setting}: {json.dumps(str(folder / file))}" for setting, file in files.items()]


def _build_account(each: SiteUser) -> Mapping[str, Any]:
    access, user = each.access, each.user
    rights = build_rights(user, access.plan, access.names, access.readers.get(user, ()), access.public_keys[user])
    return {
        "limits": {"max_connections": limit_connections(access.plan)},
        "users": [{"nkey": access.public_keys[user], "permissions": build_permissions(user, rights)}],
    }


def _remotes(users: Sequence[SiteUser], urls: Sequence[str], authority: str) -> Iterator[str]:
    waiting = f'first_info_timeout: "{INFO_SECONDS}s"'
    tls = f"tls {{ ca_file: {json.dumps(authority)}, handshake_first: true, timeout: 5 }}"
    for each in users:
        account = json.dumps(account_of(each.access.plan.run, each.user))
        yield f"    {{ urls: {json.dumps(urls)}, account: {account}, nkey: {json.dumps(each.seed)}, {waiting}, {tls} }}"
