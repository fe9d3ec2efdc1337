"""``fleetbus sessions [RUN]``: what every worker holds right now: episodes, turns, step-wise sessions."""

from typing import Any

import anyio
import click

from fleetbus.config.settings import Configuration
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import MalformedMessage, Subjects
from fleetbus_workers.cli.look.run_options import reach_options, run_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import build_table, json_option, print_json, print_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.log_access import open_run

LISTEN_SECONDS = 2.5
"""A heartbeat of every living worker comes within this."""

ANSWER_SECONDS = 2.0
ROLES = ("environment", "inference")


@click.command("sessions")
@run_argument
@json_option()
@click.option("--limit", type=int, default=50, show_default=True, help="Maximum number of rows; 0: all")
@reach_options
def command(run: str | None, as_json: bool, limit: int, **values: Any) -> int:
    """List the sessions of an active run: worker, episode, turn and start time of each.

    Oldest first. Exit status 0: listed; 2: the run cannot be reached.
    """
    configuration = load_settings({**values, "run__name": run}).configuration
    rows = run_async(_list_sessions, configuration)
    shown = rows[:limit] if limit > 0 else rows
    print_json(shown) if as_json else _print(shown, len(rows))
    return FINISHED


async def _list_sessions(configuration: Configuration) -> list[dict[str, object]]:
    subjects = Subjects(configuration.run.name)
    async with open_run(configuration, "operator") as bus:
        held: dict[str, tuple[str, tuple[str, ...]]] = {}
        for role, worker in await _list_workers(bus, subjects):
            answer = await _request_sessions(bus, subjects, role, worker)
            held[worker] = (role, answer if answer is not None else ("(no answer)",))
        rows: list[dict[str, Any]] = []
        for worker, (role, sessions) in held.items():
            known = {"worker": worker, "role": role}
            rows += [known | {"session": name} | await _read_claim(bus, subjects, role, name) for name in sessions]
    return sorted(rows, key=lambda row: -(row["seconds"] or 0.0))


async def _list_workers(bus: Any, subjects: Any) -> list[tuple[str, str]]:
    from fleetbus.delivery.heartbeats import decode_heartbeat

    found: dict[tuple[str, str], None] = {}
    async with bus.listen(subjects.heartbeats) as heartbeats:
        with anyio.move_on_after(LISTEN_SECONDS):
            while True:
                subject, payload = await heartbeats.receive()
                try:
                    beat = decode_heartbeat(subject, payload)
                except MalformedMessage:
                    continue
                if beat.role in ROLES:
                    found[beat.role, beat.worker] = None
    return sorted(found)


async def _request_sessions(bus: Any, subjects: Any, role: str, worker: str) -> tuple[str, ...] | None:
    from fleetbus_schemas import ControlAnswered, ControlRequested, MalformedMessage, decode, encode

    subject = subjects.control(role, worker, "ping")
    try:
        answer = await bus.request(subject, encode(ControlRequested(command="ping")), timeout=ANSWER_SECONDS)
        return decode(ControlAnswered, answer, subject=subject).busy_with
    except (NoResponders, RequestUnanswered, MalformedMessage):
        return None


async def _read_claim(bus: Any, subjects: Any, role: str, name: str) -> dict[str, object]:
    """Read when the session's newest claim was stored, and how far it is."""
    episode, _, rest = name.partition(".")
    entries = await bus.history([subjects.episode(episode), subjects.session(episode)]) if "(" not in name else []
    began = entries[-1].time_ns if entries else 0
    turn = rest.rpartition(".")[2] if role == "inference" else ""
    return {"episode": episode, "turn": turn, "seconds": (bus.now_ns() - began) / 1e9 if began else None}


def _print(rows: list[dict[str, Any]], total: int) -> None:
    from fleetbus_workers.observe.run.formatting import format_duration

    table = build_table("session,worker,role", right="turn,for")
    for row in rows:
        since = "" if row["seconds"] is None else format_duration(row["seconds"])
        table.add_row(row["episode"], row["worker"], row["role"], row["turn"], since)
    print_table(table)
    print(f"{total} sessions" + (f", the {len(rows)} oldest shown (--limit 0: all)" if len(rows) < total else ""))
