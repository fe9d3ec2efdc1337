"""The part of nats-server's configuration that is about trust: TLS, and the accounts of each run with their imports. Pure.

Ports and store stay with whoever runs the server: ``nats-server -c nats-server.conf -js -sd FOLDER -a HOST -p PORT``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from fleetbus.auth.permissions import Need, Rights, build_inbox_prefix, build_rights
from fleetbus.auth.shared_values import format_sharing
from fleetbus.bus.streams import API, IMPORTED_API, RunPlan
from fleetbus_schemas.channels import ROLES, WORKERS

ANSWER_SECONDS = 60
"""How long a question to a worker may be answered."""

API_ANSWER_SECONDS = 30
"""How long a question to JetStream with one answer may be answered; asked again it is another question."""

API_ANSWERS_SECONDS = 6
"""The same for one with any number of answers, of which the server remembers where they go: from one answer to the next. More
than a pull request may wait (`fleetbus.bus.nats.pull_requests`)."""

GREETING_SECONDS = 2
"""How long the server waits for a handshake before it greets in the clear. Its own choice, 50 ms, is too short for a client on
a busy machine, who then hears a greeting where it expects a handshake."""


CONNECTIONS_PER_LANE, SPARE_CONNECTIONS = 4, 256
"""One key may hold so many connections: those of as many workers as there may be of a role, and of clients. Without a bound one
key takes all that the server has, 65,536."""

SUBSCRIPTIONS, LEAF_SUBSCRIPTIONS = 2_048, 32_768
"""One connection may hold so many: a worker has some 30, a client one more per reader, and a leaf node those of all workers of
its site. Without a bound one connection takes the server's memory."""

SMALL_PAYLOAD = 8 << 10
"""Bytes of a message of those who only ask, and store leases and floors. It also bounds the filters of a consumer,
which the server compares pair by pair while it answers no other question to JetStream."""

SMALL_SENDERS = frozenset({"monitor", "recorder"})

CLIENTS, LEAF = ("STANDARD", "WEBSOCKET"), ("LEAFNODE",)
"""nats-server's words for ways to connect."""

SITES = 64
"""One key may connect so many leaf nodes to a server, each for as many workers as it likes."""

WRITTEN_BY = "# Written by `fleetbus auth init`"


class RunAccess(msgspec.Struct, frozen=True, kw_only=True):
    """One run on the server: what its consumers are called there, by which names a user may read, and the public keys of its
    users. ``leaf_roles`` are those whose keys may connect leaf nodes; where it is empty nobody listens for any."""

    plan: RunPlan
    names: Mapping[str, str]
    readers: Mapping[str, Sequence[str]]
    public_keys: Mapping[str, str]
    leaf_roles: Sequence[str] = ()


def account_of(run: str, user: str = "admin") -> str:
    """The account of a user; the admin's is that of the run's streams. No run's name contains ``@``."""
    return f"fb_{run}" if user == "admin" else f"fb_{run}@{user}"


def server_config(
    runs: Sequence[RunAccess], folder: PurePosixPath, *, cluster: bool = False, listeners: Sequence[str] = ()
) -> str:
    """The text of the file. ``folder`` is where the server finds the certificates; there are no keys in the text. ``listeners``
    are lines for whom else it listens to (`fleetbus.auth.leaf_config`).

    The server speaks TLS alone. Clients of ours begin with the handshake, so a third party cannot downgrade the connection;
    others get a greeting in the clear, after which they must turn to TLS.
    """
    return "\n".join(
        [
            f"{WRITTEN_BY}; start with: nats-server -c THIS_FILE -js -sd FOLDER [-a HOST] [-p PORT]",
            'host: "127.0.0.1"',
            "tls {",
            f"  cert_file: {json.dumps(str(folder / 'server.pem'))}",
            f"  key_file: {json.dumps(str(folder / 'server-key.pem'))}",
            f'  handshake_first: "{GREETING_SECONDS}s"',
            "  timeout: 5",
            "}",
            "authorization { timeout: 5 }",
            *(['include "./cluster.conf"'] if cluster else []),
            *listeners,
            "accounts {",
            *(run_accounts(run) for run in runs),
            "}",
            "",
        ]
    )


def run_accounts(run: RunAccess) -> str:
    """The accounts of one run, as they stand in the file."""
    rights = {user: build_rights(user, run.plan, run.names, run.readers.get(user, ()), run.public_keys[user]) for user in ROLES}
    return "\n".join(format_sharing({account_of(run.plan.run, user): _build_account(run, user, rights) for user in ROLES}))


def parse_runs(text: str) -> list[str]:
    """The runs that a configuration which `server_config` wrote allows."""
    return re.findall(r'^ *"fb_([\w-]+)": ?\{', text, flags=re.MULTILINE)


def parse_policies(text: str) -> list[str]:
    """The policies that such a configuration allows in any run, in the order in which it names them."""
    return list(dict.fromkeys(re.findall(r'\.fbwork_[\w-]+\.obs_([\w-]+)_any"', text)))


def _build_account(run: RunAccess, user: str, rights: Mapping[str, Rights]) -> dict[str, Any]:
    own = rights[user]
    exports = list(_streams_exports(run, rights) if user == "admin" else _worker_exports(run, user, rights))
    imports = list(_imports(run.plan.run, own))
    key = {"nkey": run.public_keys[user]} | _limit_connection_types(run, user)
    return {
        "limits": _build_limits(run, user),
        **({"jetstream": "enabled"} if user == "admin" else {}),
        "users": [key | ({} if own.everything else {"permissions": build_permissions(user, own)})],
        **({"exports": exports} if exports else {}),
        **({"imports": imports} if imports else {}),
        **({"mappings": {f"{IMPORTED_API}.>": f"{API}.>"}} if user == "admin" else {}),
    }


def _limit_connection_types(run: RunAccess, user: str) -> dict[str, Any]:
    """Leaf nodes only with the keys of sites. A reload does not end a leaf node's connection when its key is gone, so that any
    key that may connect one is withdrawn in full by a restart alone."""
    if not run.leaf_roles:
        return {}
    return {"allowed_connection_types": [*CLIENTS, *(LEAF if user in run.leaf_roles else ())]}


def _build_limits(run: RunAccess, user: str) -> dict[str, int]:
    """The quotas of a user's account, and so of its key; each but ``max_connections`` and ``max_leafs`` is per connection."""
    limits = {"max_connections": limit_connections(run.plan), "max_subscriptions": SUBSCRIPTIONS}
    if user in SMALL_SENDERS:
        limits["max_payload"] = SMALL_PAYLOAD
    if user in run.leaf_roles:
        limits |= {"max_leafs": SITES, "max_subscriptions": LEAF_SUBSCRIPTIONS}
    return limits


def limit_connections(plan: RunPlan) -> int:
    """The connections that one user of a run may have at a server."""
    lanes = sum(consumer.name.startswith("act_") for consumer in plan.consumers)
    return CONNECTIONS_PER_LANE * lanes + SPARE_CONNECTIONS


def build_permissions(user: str, rights: Rights) -> dict[str, Any]:
    """The subjects that a server holds a user to."""
    inbox = f"{build_inbox_prefix(user)}.>"
    publish, subscribe = {"allow": [inbox, *rights.publish]}, {"allow": [inbox, *rights.subscribe]}
    answers = {"allow_responses": {"max": 1, "expires": f"{ANSWER_SECONDS}s"}} if rights.serves else {}
    return {"publish": publish, "subscribe": subscribe} | answers


def _streams_exports(run: RunAccess, rights: Mapping[str, Rights]) -> Iterator[dict[str, Any]]:
    """The exports that the roles of the run take from; each takes what it imports, and that alone."""
    accounts = [account_of(run.plan.run, user) for user in ROLES if user != "admin"]
    for need in dict.fromkeys(_offer(need, run.plan.log.name) for own in rights.values() for need in own.asks):
        yield _service(need.subject, accounts, API_ANSWERS_SECONDS if need.streamed else API_ANSWER_SECONDS, need.streamed)


def _offer(need: Need, log: str) -> Need:
    """The export that a need is a part of. No two cover the same need, but for those that are spelled as it is: which of them
    the server would take is not said. It grants nothing: a role may ask what its account imports."""
    subject = need.target or need.subject
    kind, *rest = subject.removeprefix(f"{IMPORTED_API}.").split(".")
    if not subject.startswith(f"{IMPORTED_API}."):
        depth = 3 if subject.startswith("$JS.ACK.") else 2
        subject = ".".join([*subject.split(".")[:depth], ">"])
    elif kind == "STREAM":
        subject = f"{IMPORTED_API}.STREAM.>"
    elif kind == "CONSUMER":
        subject = f"{IMPORTED_API}.CONSUMER.{rest[0]}.>"
    elif need.streamed and len(rest) == 2:  # DIRECT.GET of a stream
        subject = f"{IMPORTED_API}.DIRECT.GET.*"
    elif not need.streamed and rest[1] != log:
        subject = f"{IMPORTED_API}.DIRECT.GET.{rest[1]}.>"
    return Need(subject=subject, streamed=need.streamed)


def _worker_exports(run: RunAccess, user: str, rights: Mapping[str, Rights]) -> Iterator[dict[str, Any]]:
    if user not in WORKERS:
        return
    called = dict.fromkeys(call for other in ROLES for call in rights[other].calls if call[0] == user)
    for call in called:  # some call a part of what is served: one command
        callers = [account_of(run.plan.run, other) for other in ROLES if call in rights[other].calls]
        yield _service(call[1], callers, ANSWER_SECONDS, streamed=True)
    for subject in rights[user].tells:
        listeners = [account_of(run.plan.run, other) for other in ROLES if (user, subject) in rights[other].hears]
        if listeners:
            yield {"stream": subject, "accounts": listeners}


def _imports(run: str, rights: Rights) -> Iterator[dict[str, Any]]:
    for need in rights.asks:
        to = {"to": need.subject} if need.target else {}
        yield {"service": _from(account_of(run), need.target or need.subject)} | to
    for role, subject in rights.calls:
        yield {"service": _from(account_of(run, role), subject)}
    for role, subject in rights.hears:
        yield {"stream": _from(account_of(run, role), subject)}


def _from(account: str, subject: str) -> dict[str, str]:
    return {"account": account, "subject": subject}


def _service(subject: str, accounts: Sequence[str], seconds: int, streamed: bool) -> dict[str, Any]:
    answers = {"response": "stream"} if streamed else {}  # one answer unless it is said
    return {"service": subject, "accounts": list(accounts), **answers, "threshold": f"{seconds}s"}
