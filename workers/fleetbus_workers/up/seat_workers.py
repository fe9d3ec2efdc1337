"""The workers that `up` starts for the policies of seats: an inference worker for each, and a learner for one that is trained.

They have the configuration of the run, with options that change it to that of their policy
(docs/decisions/0253-up-of-several-learners.md).
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetbus.config.fields import list_settings
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.seats import SeatSetting, configure_learner, configure_seat, list_trained_seats, parse_seats
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import WorkerRole


class SeatWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker called ``name``, the ``index``-th of its role, with ``options`` beside the run's configuration."""

    role: WorkerRole
    name: str
    index: int
    options: tuple[str, ...]
    threads: int
    output: tuple[Path, ...] = ()


def list_seat_workers(configuration: Configuration) -> list[SeatWorker]:
    """The workers of a run's seats: learners first. The run's own workers of a role have the first places in it,
    workers that compute nothing the last."""
    found = []
    for index, seat in enumerate(list_trained_seats(configuration.run), 1):
        configured = configure_learner(configuration, seat)
        folder = policy_folder(configured.run)
        found.append(
            SeatWorker(
                role="learner",
                name=name_learner(seat.policy),
                index=index,
                options=tuple(list_changes(configuration, configured)),
                threads=configuration.learner.threads,
                output=(folder.checkpoints, folder.model),
            )
        )
    served = [seat for seat in parse_seats(configuration.run.seats) if seat.is_served]
    for index, seat in enumerate(sorted(served, key=lambda seat: bool(seat.url)), configuration.inference.workers):
        found.append(
            SeatWorker(
                role="inference",
                name=f"inference-{seat.seat}",
                index=index,
                options=tuple(list_seat_options(configuration, seat)),
                threads=configuration.inference.threads,
            )
        )
    return found


def describe_unserved_seats(configuration: Configuration) -> list[str]:
    """A line for each seat whose policy no worker of `up` serves: its episodes wait for one that somebody else starts."""
    seats = parse_seats(configuration.run.seats)
    served = {configuration.run.policy, *(seat.policy for seat in seats if seat.is_served)}
    return [
        f"the seat {seat.seat} waits for inference workers of the policy {seat.policy}, of which `up` starts none "
        f"(--seat {seat.seat}=train would train it)"
        for seat in seats
        if seat.policy not in served
    ]


def name_learner(policy: str) -> str:
    """The name of the learner that `up` starts for the policy of a seat."""
    return f"learner-{policy}"


def list_seat_options(configuration: Configuration, seat: SeatSetting) -> list[str]:
    """The options with which an inference worker of a configuration serves the policy of a seat."""
    return list_changes(configuration, configure_seat(configuration, seat))


def list_changes(before: Configuration, after: Configuration) -> list[str]:
    """The options that make one configuration of another."""
    options: list[str] = []
    for setting in list_settings():
        value = getattr(getattr(after, setting.table), setting.key)
        if value != getattr(getattr(before, setting.table), setting.key):
            options += [setting.flag] if value is True else [setting.flag, str(value)]
    return options


def check_seat_names(seats: Sequence[SeatSetting]) -> None:
    """Raise `UserError` for a seat whose workers would have a name that another worker gets when it is started again."""
    for seat in seats:
        if seat.is_served and seat.seat.rpartition("-")[2].isdecimal():
            raise UserError(
                f"run.seats: `up` numbers the starts of its workers, and would call one inference-{seat.seat}: give the seat "
                f"{seat.seat} a name that does not end so, or serve it by a policy of your own (--seat {seat.seat}=POLICY)"
            )
