"""The tasks of an environment on a server of the Open Reward Standard, as fleetbus reads them: places in the server's data.

Nothing of a task but its place is written: what a server lists may hold the answer, and the prompt comes with each session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.ors.address import (
    TOKEN_VARIABLE,
    Address,
    build_path,
    choose_environment,
    parse_address,
)
from fleetbus_workers.environment.adapters.ors.messages import Split, TaskCount, decode_answer, read_detail
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error

SECONDS = 60.0
"""The limit of one answer; a server may load its data for it."""
MAX_BYTES = 32 << 20
NO_SUCH_PAGE = (404, 405)

T = TypeVar("T")


def list_tasks(spec: str, count: int, *, env: str = "") -> list[dict[str, Any]]:
    """The first ``count`` tasks of a split as entries of a tasks file; ``env`` is their environment key.

    Without ``split=`` all splits of the type ``train`` are read: others are there to be held out. Raises `UserError`.
    """
    address = parse_address(spec.partition(":")[2])
    with _connect() as client:
        name = _find_environment(client, address)
        splits = _ask(client, "GET", address, build_path(name, "splits"), list[Split])
        wanted = [each.name for each in splits if (each.name == address.split if address.split else each.type == "train")]
        if not wanted:
            has = ", ".join(f"{each.name} ({each.type})" for each in splits) or "none"
            problem = f"no split {address.split!r}" if address.split else "no split for training: name one with split="
            raise UserError(f"environment {spec!r}: the server has {problem}; its splits are {has}")
        tasks: list[dict[str, Any]] = []
        for split in wanted:
            number = _count_tasks(client, address, name, split)
            tasks += [_build_entry(name, split, index, env) for index in range(min(number, count - len(tasks)))]
    return tasks


def check_server(spec: str) -> None:
    """Raise `UserError` if the server of a spec does not answer, or lacks the environment. Blocks, for `SECONDS` at most."""
    with _connect() as client:
        _find_environment(client, parse_address(spec.partition(":")[2]))


def _build_entry(name: str, split: str, index: int, env: str) -> dict[str, Any]:
    entry = {"key": f"{name}-{split}-{index}", "prompt": "", "config": {"split": split, "index": index}}
    return entry | ({"env_key": env} if env else {})


def _count_tasks(client: httpx.Client, address: Address, name: str, split: str) -> int:
    """The number of a split's tasks, also of a server that can only list them."""
    body = {"split": split}
    try:
        return _ask(client, "POST", address, build_path(name, "num_tasks"), TaskCount, body).num_tasks
    except _NoSuchPage:
        listed = _ask(client, "POST", address, build_path(name, "tasks"), dict[str, Any], body).get("tasks")
        return len(listed) if isinstance(listed, list) else 0


def _find_environment(client: httpx.Client, address: Address) -> str:
    return choose_environment(address, _ask(client, "GET", address, "/list_environments", list[str]))


class _NoSuchPage(UserError):
    """The server does not have this page."""


def _connect() -> httpx.Client:
    key = os.environ.get(TOKEN_VARIABLE, "")
    return httpx.Client(headers={"X-API-Key": key} if key else {}, timeout=httpx.Timeout(SECONDS, connect=10.0))


def _ask(
    client: httpx.Client, method: str, address: Address, path: str, kind: type[T], body: Mapping[str, Any] | None = None
) -> T:
    """An answer as ``kind``, of bounded size and time. Raises `UserError` with one line."""
    until, content = time.monotonic() + SECONDS, bytearray()
    try:
        with client.stream(method, address.url + path, json=body, headers={"accept-encoding": "identity"}) as answer:
            for chunk in answer.iter_raw():
                content += chunk
                if len(content) > MAX_BYTES or time.monotonic() > until:
                    raise UserError(f"the ORS server {address.url} sends an answer at {path} without an end")
        if answer.status_code in NO_SUCH_PAGE:
            raise _NoSuchPage(
                f"{address.url} is no ORS server, or lacks {path}: {answer.status_code} {read_detail(bytes(content))}"
            )
        if answer.status_code != 200:
            raise UserError(
                f"the ORS server {address.url} answers {path} with {answer.status_code} {read_detail(bytes(content))}"
            )
        return decode_answer(bytes(content), kind, os.environ.get(TOKEN_VARIABLE, ""))
    except httpx.HTTPError as error:
        said = clean_error(str(error)) or type(error).__name__
        raise UserError(f"the ORS server {address.url} cannot be reached: {said}") from error
    except EnvironmentFailed as error:
        raise UserError(f"{address.url} is no ORS server: {error} (at {path})") from error
