"""The tasks of an environment on a server of the Open Reward Standard, as fleetbus reads them: places in the server's data.

Nothing of a task but its place is written: what a server lists may hold the answer, and the prompt comes with each session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import anyio

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.ors.address import Address, build_path, choose_environment, parse_address
from fleetbus_workers.environment.adapters.ors.client import OrsClient, Refused
from fleetbus_workers.environment.adapters.ors.messages import BadAnswer, Split, TaskCount
from fleetbus_workers.environment.base import EnvironmentFailed

SECONDS = 60.0
"""The limit of one answer; a server may load its data for it."""
NO_SUCH_PAGE = (404, 405)

T = TypeVar("T")


def list_tasks(spec: str, count: int, *, env: str = "") -> list[dict[str, Any]]:
    """The first ``count`` tasks of a split as entries of a tasks file; ``env`` is their environment key.

    Without ``split=`` all splits of the type ``train`` are read: others are there to be held out. Raises `UserError`.
    """
    address = parse_address(spec.partition(":")[2])
    return _run(address, partial(_list_tasks, spec=spec, address=address, count=count, env=env))


def check_server(spec: str) -> None:
    """Raise `UserError` if the server of a spec does not answer, or lacks the environment. Blocks, for `SECONDS` at most."""
    address = parse_address(spec.partition(":")[2])
    _run(address, partial(_find_environment, address=address))


def _run(address: Address, ask: Callable[[OrsClient], Awaitable[T]]) -> T:
    """The result of ``ask``; a failure of the server's is a `UserError` with one line."""

    async def connect() -> T:
        client = OrsClient(address.url)
        async with client.run():
            return await ask(client)

    try:
        return anyio.run(connect)
    except EnvironmentFailed as error:
        is_none = isinstance(error, BadAnswer) or (isinstance(error, Refused) and error.status in NO_SUCH_PAGE)
        said = f"{address.url} is no ORS server, or lacks a page" if is_none else "the ORS server failed"
        raise UserError(f"{said}: {error}") from error


async def _list_tasks(client: OrsClient, *, spec: str, address: Address, count: int, env: str) -> list[dict[str, Any]]:
    name = await _find_environment(client, address)
    splits = await _ask(client, "GET", build_path(name, "splits"), list[Split])
    wanted = [each.name for each in splits if (each.name == address.split if address.split else each.type == "train")]
    if not wanted:
        has = ", ".join(f"{each.name} ({each.type})" for each in splits) or "none"
        problem = f"no split {address.split!r}" if address.split else "no split for training: name one with split="
        raise UserError(f"environment {spec!r}: the server has {problem}; its splits are {has}")
    tasks: list[dict[str, Any]] = []
    for split in wanted:
        number = await _count_tasks(client, name, split)
        tasks += [_build_entry(name, split, index, env) for index in range(min(number, count - len(tasks)))]
    return tasks


def _build_entry(name: str, split: str, index: int, env: str) -> dict[str, Any]:
    entry = {"key": f"{name}-{split}-{index}", "prompt": "", "config": {"split": split, "index": index}}
    return entry | ({"env_key": env} if env else {})


async def _count_tasks(client: OrsClient, name: str, split: str) -> int:
    """The number of a split's tasks, also of a server that can only list them."""
    body = {"split": split}
    try:
        return (await _ask(client, "POST", build_path(name, "num_tasks"), TaskCount, body)).num_tasks
    except Refused as error:
        if error.status not in NO_SUCH_PAGE:
            raise
        listed = (await _ask(client, "POST", build_path(name, "tasks"), dict[str, Any], body)).get("tasks")
        return len(listed) if isinstance(listed, list) else 0


async def _find_environment(client: OrsClient, address: Address) -> str:
    return choose_environment(address, await _ask(client, "GET", "/list_environments", list[str]))


async def _ask(client: OrsClient, method: str, path: str, kind: type[T], body: Mapping[str, Any] | None = None) -> T:
    return await client.ask(method, path, kind, body=body, seconds=SECONDS, tries=1)
