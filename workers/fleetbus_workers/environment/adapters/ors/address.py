"""Addresses of servers of the Open Reward Standard: ``URL[#ENVIRONMENT] [split=NAME]``, after ``ors:``.

Without an environment a server with only one is meant. ``split`` is where `fleetbus tasks import` reads, and the split of tasks
whose config names none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple
from urllib.parse import quote

from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.task_permissions import check_http_address

TOKEN_VARIABLE = "ORS_API_KEY"
"""Sent as ``X-API-Key``; the standard's own client reads the same variable."""

FORM = "ors:URL[#ENVIRONMENT] [split=NAME]"


class Address(NamedTuple):
    """``url`` without a slash at its end, the name of an environment or nothing, the name of a split or nothing."""

    url: str
    environment: str = ""
    split: str = ""


def parse_address(text: str) -> Address:
    """Read what follows ``ors:``. Raises `UserError` for what is no address, and for one with a password."""
    place, *words = text.split() or [""]
    parts = check_http_address(f"ors:{text}", place, example="ors:http://127.0.0.1:8080#my_env", secret=TOKEN_VARIABLE)
    if parts.query:
        raise UserError(f"the address of {parts.hostname} must not have a query: set the key in {TOKEN_VARIABLE}")
    if words and (len(words) > 1 or not words[0].startswith("split=") or words[0] == "split="):
        raise UserError(f"environment 'ors:{text}' must be written as {FORM}")
    split = words[0].removeprefix("split=") if words else ""
    return Address(parts._replace(fragment="").geturl().rstrip("/"), parts.fragment, split)


def read_key() -> str:
    """The key of this process, without the line end that a file of secrets leaves. Raises `UserError` for one that no header
    can hold: an error of HTTP would show it."""
    key = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{TOKEN_VARIABLE} must have ASCII characters alone, on one line")
    return key


class Place(NamedTuple):
    """The place of a task in the server's data, and how the rewards of its calls become one."""

    split: str
    number: int
    reward: Literal["sum", "last"]


def read_place(task: Task, address: Address) -> Place:
    """The place that a task's config names. Raises `EnvironmentFailed`."""
    split, index = task.config.get("split") or address.split, task.config.get("index")
    reward = task.config.get("reward", "sum")
    if not isinstance(split, str) or not split or not isinstance(index, int) or isinstance(index, bool):
        raise EnvironmentFailed(f"task {task.key}: its config needs an index and a split; `fleetbus tasks import` writes them")
    if reward not in ("sum", "last"):
        raise EnvironmentFailed(f"task {task.key}: reward must be sum or last, not {reward!r}")
    return Place(split, index, reward)


def choose_environment(address: Address, listed: Sequence[str]) -> str:
    """The server's own name of the environment that an address means. Raises `UserError`; servers compare without case."""
    names = {name.lower(): name for name in listed}
    if address.environment and address.environment.lower() in names:
        return names[address.environment.lower()]
    if not address.environment and len(listed) == 1:
        return listed[0]
    has = f"it has {', '.join(listed)}" if listed else "it lists none"
    if address.environment:
        raise UserError(f"the ORS server {address.url} has no environment {address.environment!r}; {has}")
    raise UserError(f"name an environment of the ORS server {address.url}, as in ors:{address.url}#NAME; {has}")


def build_path(environment: str, call: str) -> str:
    """The path of a call of an environment, whatever its name holds."""
    return f"/{quote(environment, safe='')}/{call}"
