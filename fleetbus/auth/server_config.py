"""The part of nats-server's configuration that is about trust: TLS, and one user per role with its rights. Pure.

Ports, store and cluster stay with whoever runs the server: ``nats-server -c nats-server.conf -js -sd FOLDER -a HOST -p PORT``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from fleetbus.auth.permissions import Rights

ANSWER_SECONDS = 60
"""How long a question may be answered; once."""

GREETING_SECONDS = 2
"""How long the server waits for a handshake before it greets in the clear. Its own choice, 50 ms, is too short for a client on
a busy machine, who then hears a greeting where it expects a handshake."""


WRITTEN_BY = "# Written by `fleetbus auth init`"


def server_config(rights: Mapping[str, Rights], public_keys: Mapping[str, str], folder: PurePosixPath) -> str:
    """The text of the file. ``folder`` is where the server finds the certificates; there are no secrets in the text.

    The server speaks TLS alone. Clients of ours begin with the handshake, so no one in between can downgrade the connection;
    others get a greeting in the clear, after which they must turn to TLS.
    """
    lines = [
        f"{WRITTEN_BY}; start with: nats-server -c THIS_FILE -js -sd FOLDER [-a HOST] [-p PORT]",
        'host: "127.0.0.1"',
        "tls {",
        f"  cert_file: {json.dumps(str(folder / 'server.pem'))}",
        f"  key_file: {json.dumps(str(folder / 'server-key.pem'))}",
        f'  handshake_first: "{GREETING_SECONDS}s"',
        "  timeout: 5",
        "}",
        "authorization {",
        "  timeout: 5",
        "  users: [",
    ]
    for user, its_rights in rights.items():
        lines += [f"    {line}" for line in _render_user(user, public_keys[user], its_rights)]
    return "\n".join([*lines, "  ]", "}", ""])


def parse_runs(text: str) -> list[str]:
    """The runs that a configuration which `server_config` wrote allows."""
    return list(dict.fromkeys(re.findall(r'STREAM\.INFO\.fb_([\w-]+)"', text)))


def _render_user(user: str, public_key: str, rights: Rights) -> list[str]:
    lines = [f"{{  # {user}", f"  nkey: {public_key}", "  permissions: {", "    publish: {"]
    lines += _render_subjects("allow", rights.publish)
    if rights.deny:
        lines += _render_subjects("deny", rights.deny)
    lines += ["    }", "    subscribe: {", *_render_subjects("allow", rights.subscribe), "    }"]
    if rights.answers:
        lines.append(f'    allow_responses: {{ max: 1, expires: "{ANSWER_SECONDS}s" }}')
    return [*lines, "  }", "}"]


def _render_subjects(name: str, subjects: Sequence[str]) -> list[str]:
    return [f"      {name}: [", *(f"        {json.dumps(subject)}" for subject in subjects), "      ]"]
