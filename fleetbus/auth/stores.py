"""The account whose log a nats-server's store holds: the streams of each account lie in a folder of that account's name.

A log that was begun with keys is in the account of its run, under consumer names that the admin's key made; one that was
begun without is in the account of everybody. Neither server would find the other's log.
"""

from pathlib import Path

from fleetbus.auth.server_config import account_of
from fleetbus.bus.streams import log_stream
from fleetbus.errors import UserError

_LOG_PREFIX = log_stream("")

_EVERYBODY = "$G"
"""The account of whoever connects to a server without accounts."""


def check_store(store: Path, run: str, *, keys: bool) -> None:
    """Raise `UserError` if the run's log was begun the other way, or if the only logs are those of other runs, in a folder that
    was copied or renamed: continuing would begin it anew."""
    if not keys and _holds_log(store, account_of(run), run):
        raise UserError(f"run {run} was begun with keys: give --nats-auth again, or begin another run (--run)")
    if keys and _holds_log(store, _EVERYBODY, run):
        raise UserError(f"run {run} was begun without keys: leave out --nats-auth, or begin another run (--run)")
    others = _list_logs(store)
    if others and run not in others:
        raise UserError(
            f"{store.parent} holds the log of run {others[0]}: rename it back to {others[0]}, or begin another run "
            f"with what it learned (fleetbus fork {run} --run NAME)"
        )


def find_account(store: Path, run: str) -> str:
    """The account that holds the run's log; empty for that of a server without accounts, as for a log that is not there."""
    return account_of(run) if _holds_log(store, account_of(run), run) else ""


def _list_logs(store: Path) -> list[str]:
    """The runs whose logs are there, in any account."""
    return sorted(path.name.removeprefix(_LOG_PREFIX) for path in store.glob(f"jetstream/*/streams/{_LOG_PREFIX}*"))


def _holds_log(store: Path, account: str, run: str) -> bool:
    return (store / "jetstream" / account / "streams" / log_stream(run)).is_dir()
