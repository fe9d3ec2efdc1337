"""Labels what was started with its owner: containers and, as variables, processes; and ends what nobody owns any more.

A worker that is killed cannot end what it started. Whoever comes after it finds that by its owner, who is no more.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

PREFIX = "fleetbus"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

NEVER = 1 << 40
"""Unix seconds after which nothing expires any more."""

_OWNER = "FLEETBUS_SERVER_OWNER"


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of something: ``owner`` is this process (see `build_process_owner`), ``expires`` Unix seconds."""

    run: str
    episode: str
    owner: str
    expires: int

    def to_mapping(self) -> dict[str, str]:
        """As a container carries them; every value is one that all systems accept."""
        values = {"run": self.run, "episode": self.episode, "owner": self.owner, "expires": str(self.expires)}
        return {f"{PREFIX}.{name}": sanitize_label(value) for name, value in values.items()}


def sanitize_label(value: str) -> str:
    """The value, reduced to the characters and length that labels permit."""
    if not value or _LABEL.fullmatch(value):
        return value
    return re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63].strip("._-")


def build_process_owner() -> str:
    """This host and process; with its time of start, because process ids come again."""
    return f"{sanitize_label(socket.gethostname())[:24]}_{os.getpid()}_{_read_start_time(os.getpid())}"


def is_abandoned(owner: str, expires: str, *, now: float | None = None) -> bool:
    """True if a server with these labels is unused: it has expired, or its process on this host has exited."""
    if expires.isdecimal() and int(expires) < (time.time() if now is None else now):
        return True
    host, _, rest = owner.rpartition("_")[0].rpartition("_")
    started = owner.rpartition("_")[2]
    if not host or not rest.isdecimal() or host != sanitize_label(socket.gethostname())[:24]:
        return False
    return _read_start_time(int(rest)) != started


def _read_start_time(process: int) -> str:
    """The start time of a process of this machine, in ticks since the machine's; ``0`` if there is none or it is unknown."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        if os.path.isdir("/proc/self"):
            return "0"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass
    return "0"


def build_label_variables(labels: Labels) -> dict[str, str]:
    """The labels as variables, by which a process and all that it starts are found again."""
    return {f"FLEETBUS_SERVER_{name.partition('.')[2].upper()}": value for name, value in labels.to_mapping().items()}


def build_owner_variables() -> dict[str, str]:
    """For a process that is to end with this one: by them it is found if it does not."""
    return build_label_variables(Labels(run="", episode="", owner=build_process_owner(), expires=NEVER))


def sweep_abandoned_processes() -> list[str]:
    """Kill what workers that have exited left running on this machine; see `sweep_processes`."""
    return sweep_processes(lambda labels: is_abandoned(labels.owner, str(labels.expires)))


def sweep_processes(is_wanted: Callable[[Labels], bool]) -> list[str]:
    """Kill processes of this machine whose labels are wanted; the ids of those that were. A process may have hidden them. Only
    where /proc shows the variables of processes."""
    removed = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to somebody else
        variables = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries if entry)
        if _OWNER in variables and is_wanted(_read_labels(variables)):
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue
            removed.append(folder.name)
    return removed


def _read_labels(variables: Mapping[str, str]) -> Labels:
    expires = variables.get("FLEETBUS_SERVER_EXPIRES", "")
    return Labels(
        run=variables.get("FLEETBUS_SERVER_RUN", ""),
        episode=variables.get("FLEETBUS_SERVER_EPISODE", ""),
        owner=variables[_OWNER],
        expires=int(expires) if expires.isdecimal() else NEVER,
    )
