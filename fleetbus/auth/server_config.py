"""The part of nats-server's configuration that is about trust: TLS, and the accounts of each run with their imports. Pure.

Ports and store stay with whoever runs the server: ``nats-server -c nats-server.conf -js -sd FOLDER -a HOST -p PORT``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from fleetbus.auth.permissions import Need, Rights, build_inbox_prefix, build_rights
from fleetbus.bus.streams import RunPlan
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

WRITTEN_BY = "# Written by `fleetbus auth init`"


class RunAccess(msgspec.Struct, frozen=True, kw_only=True):
    """One run on the server: what its consumers are called there, by which names a user may read, and the public keys of its
    users."""

    plan: RunPlan
    names: Mapping[str, str]
    readers: Mapping[str, Sequence[str]]
    public_keys: Mapping[str, str]


def account_of(run: str, user: str = "admin") -> str:
    """The account of a user; the admin's is that of the run's streams. No run's name contains ``@``."""
    return f"fb_{run}" if user == "admin" else f"fb_{run}@{user}"


def server_config(runs: Sequence[RunAccess], folder: PurePosixPath, *, cluster: bool = False) -> str:
    """The text of the file. ``folder`` is where the server finds the certificates; there are no keys in the text.

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
            "accounts {",
            *(run_accounts(run) for run in runs),
            "}",
            "",
        ]
    )


def run_accounts(run: RunAccess) -> str:
    """The accounts of one run, as they stand in the file."""
    rights = {user: build_rights(user, run.plan, run.names, run.readers.get(user, ())) for user in ROLES}
    lines: list[str] = []
    for user in ROLES:
        lines += [f"  {json.dumps(account_of(run.plan.run, user))}: {{"]
        lines += [f"    {line}" for line in _account_lines(run, user, rights)]
        lines += ["  }"]
    return "\n".join(lines)


def parse_runs(text: str) -> list[str]:
    """The runs that a configuration which `server_config` wrote allows."""
    return re.findall(r'^  "fb_([\w-]+)": \{$', text, flags=re.MULTILINE)


def _account_lines(run: RunAccess, user: str, rights: Mapping[str, Rights]) -> Iterator[str]:
    own = rights[user]
    lanes = sum(consumer.name.startswith("act_") for consumer in run.plan.consumers)
    yield f"limits: {{ max_connections: {CONNECTIONS_PER_LANE * lanes + SPARE_CONNECTIONS} }}"
    if user == "admin":
        yield "jetstream: enabled"
    yield f"users: [ {{ nkey: {run.public_keys[user]}"
    if not own.everything:
        inbox = f"{build_inbox_prefix(user)}.>"
        yield "  permissions: {"
        yield from _render_subjects("publish", (inbox, *own.publish))
        yield from _render_subjects("subscribe", (inbox, *own.subscribe))
        if own.serves:
            yield f'    allow_responses: {{ max: 1, expires: "{ANSWER_SECONDS}s" }}'
        yield "  }"
    yield "} ]"
    yield from _format_list("exports", _streams_exports(run, rights) if user == "admin" else _worker_exports(run, user, rights))
    yield from _format_list("imports", _imports(run.plan.run, own))


def _streams_exports(run: RunAccess, rights: Mapping[str, Rights]) -> Iterator[str]:
    needed: dict[Need, list[str]] = {}
    for user, its_rights in rights.items():
        for need in its_rights.asks:
            offered = Need(subject=need.target or need.subject, streamed=need.streamed)
            needed.setdefault(offered, []).append(account_of(run.plan.run, user))
    for need, accounts in needed.items():
        yield _service(need.subject, accounts, API_ANSWERS_SECONDS if need.streamed else API_ANSWER_SECONDS, need.streamed)


def _worker_exports(run: RunAccess, user: str, rights: Mapping[str, Rights]) -> Iterator[str]:
    if user not in WORKERS:
        return
    called = dict.fromkeys(call for other in ROLES for call in rights[other].calls if call[0] == user)
    for call in called:  # some call a part of what is served: one command
        callers = [account_of(run.plan.run, other) for other in ROLES if call in rights[other].calls]
        yield _service(call[1], callers, ANSWER_SECONDS, streamed=True)
    for subject in rights[user].tells:
        listeners = [account_of(run.plan.run, other) for other in ROLES if (user, subject) in rights[other].hears]
        if listeners:
            yield f"stream: {json.dumps(subject)}, accounts: {json.dumps(listeners)}"


def _imports(run: str, rights: Rights) -> Iterator[str]:
    for need in rights.asks:
        to = f", to: {json.dumps(need.subject)}" if need.target else ""
        yield f"service: {_from(account_of(run), need.target or need.subject)}{to}"
    for role, subject in rights.calls:
        yield f"service: {_from(account_of(run, role), subject)}"
    for role, subject in rights.hears:
        yield f"stream: {_from(account_of(run, role), subject)}"


def _from(account: str, subject: str) -> str:
    return f"{{ account: {json.dumps(account)}, subject: {json.dumps(subject)} }}"


def _service(subject: str, accounts: Sequence[str], seconds: int, streamed: bool) -> str:
    answers = "stream" if streamed else "singleton"
    return f'service: {json.dumps(subject)}, accounts: {json.dumps(accounts)}, response: {answers}, threshold: "{seconds}s"'


def _render_subjects(name: str, subjects: Sequence[str]) -> Iterator[str]:
    yield f"    {name}: {{ allow: ["
    yield from (f"      {json.dumps(subject)}" for subject in subjects)
    yield "    ] }"


def _format_list(name: str, items: Iterator[str]) -> Iterator[str]:
    lines = [f"  {{ {item} }}" for item in items]
    if lines:
        yield f"{name}: ["
        yield from lines
        yield "]"
