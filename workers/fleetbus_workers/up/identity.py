"""Identity of a run: starting the same name again requires the same model, tasks, environment, seats and seed.

Written to ``run.json`` at the first start. Steps, worker counts and limits may change between starts; these may not.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetbus.config.load import strip_credentials
from fleetbus.config.seats import SeatSetting, parse_seats
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.files import replace_file
from fleetbus_schemas.message import UNREADABLE

_DEFAULTS = {"model": "the starter policy", "tasks": "the warehouse tasks"}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that make a run this run, paths absolute."""

    model: str
    tasks: str
    environment: str
    seed: int
    policy: str
    pool: str
    seats: str | None = None
    """Who plays the seats of others, wherever it is served; None: written by a release that did not say."""


def build_identity(configuration: Configuration) -> Identity:
    """The identity of a configuration whose paths are absolute already."""
    run = configuration.run
    tasks = strip_credentials(run.tasks)  # it is written to a file
    return Identity(
        model=run.model,
        tasks=tasks,
        environment=run.environment,
        seed=run.seed,
        policy=run.policy,
        pool=run.pool,
        seats=", ".join(sorted(map(_name_player, parse_seats(run.seats)))),
    )


def _name_player(seat: SeatSetting) -> str:
    player = "train" if seat.trained else "league" if seat.league is not None else seat.policy
    return f"{seat.seat}={player}"


def check_identity(file: Path, identity: Identity, given: Mapping[str, str]) -> None:
    """Raise `UserError` if the run in ``file`` was started as something else; ``given`` says where settings came from."""
    if not file.is_file():
        return
    try:
        before = msgspec.json.decode(file.read_bytes(), type=Identity)
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read ({error}): restore it, or remove it if the arguments are those of the run, "
            "or give a new name with --run"
        ) from error
    for key in Identity.__struct_fields__:
        was, wanted = getattr(before, key), getattr(identity, key)
        if was is not None and was != wanted:
            origin = given.get(f"run.{key}", "the defaults")
            raise UserError(
                f"this run was started with {key} {_format_value(key, was)}, not {_format_value(key, wanted)} ({origin}): "
                "leave it out to resume the run, or give a new name with --run"
            )


def write_identity(file: Path, identity: Identity) -> None:
    """Record the identity of the run; a file that exists is not overwritten."""
    if not file.is_file():
        replace_file(file, msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n")


def _format_value(key: str, value: str | int) -> str:
    return str(value) if value != "" else _DEFAULTS.get(key, "none")
