"""The account whose log a nats-server's store holds: the streams of each account lie in a folder of that account's name.

A log that was begun with keys is in the account of its run, under consumer names that the admin's key made; one that was
begun without is in the account of everybody. Neither server would find the other's log.
"""

import json
from pathlib import Path

from fleetbus.auth.server_config import account_of
from fleetbus.bus.streams import log_stream
from fleetbus.errors import UserError
from fleetbus.files import replace_file

_EVERYBODY = "$G"
"""The account of whoever connects to a server without accounts."""


def check_store(store: Path, run: str, *, keys: bool) -> None:
    """Raise `UserError` if the run's log was begun the other way: continuing would begin it anew."""
    if not keys and _holds_log(store, account_of(run), run):
        raise UserError(f"run {run} was begun with keys: give --nats-auth again, or begin another run (--run)")
    if keys and _holds_log(store, _EVERYBODY, run):
        raise UserError(f"run {run} was begun without keys: leave out --nats-auth, or begin another run (--run)")


def build_reading_config(store: Path, run: str) -> Path | None:
    """A configuration for a server of one's own that shows the log to whoever is on this machine, as one without configuration
    would; None if it needs none, because the log was begun without keys. Raises `UserError`."""
    if not _holds_log(store, account_of(run), run):
        return None
    file = store / "reading.conf"
    accounts = {account_of(run): {"jetstream": "enabled", "users": [{"user": "reader", "password": "reader"}]}}
    try:
        replace_file(file, json.dumps({"accounts": accounts, "no_auth_user": "reader"}).encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or file}: {error.strerror}") from error
    return file


def _holds_log(store: Path, account: str, run: str) -> bool:
    return (store / "jetstream" / account / "streams" / log_stream(run)).is_dir()
