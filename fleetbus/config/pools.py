"""Pools of environment workers: where an episode is requested, by the environment key of its task, and who takes it. Pure.

The setting ``run.pool`` has one item a line: ``KEY=POOL`` for the tasks of one environment key, a plain POOL for all others. A
pool stands in the subject of its requests, so that a worker without a GPU never sees what needs one
(docs/decisions/0201-a-pool-per-environment-key.md). Above it are requesters, workers and who declares the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import InvalidName, check_name

_KEYED = re.compile(r"([^\s=]+)=(.*)")
_OTHERS = ""
"""The key under which a plain POOL stands."""


def parse_pools(text: str) -> Mapping[str, str]:
    """The pool of every environment key that has one, and under the empty key that of all others. Raises `UserError`."""
    pools: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _KEYED.fullmatch(line)
        key, pool = match.groups() if match else (_OTHERS, line)
        if key in pools:
            owner = f"for the key {key!r}" if key else "without a key"
            raise UserError(f"two pools {owner}: {pools[key]!r} and {pool!r}; give each key one KEY=POOL")
        pools[key] = _check_pool("run.pool", pool)
    return {_OTHERS: RunSettings().pool} | pools


def find_pool(pools: Mapping[str, str], key: str) -> str:
    """The pool in which the tasks of an environment key are requested."""
    return pools.get(key) or pools[_OTHERS]


def list_pools(run: RunSettings) -> tuple[str, ...]:
    """The pools of a run, each once."""
    return tuple(dict.fromkeys(parse_pools(run.pool).values()))


def list_served_pools(configuration: Configuration) -> tuple[str, ...]:
    """The pools that an environment worker takes episodes of: those that it names, or all of its run. Raises `UserError`."""
    named = dict.fromkeys(filter(None, map(str.strip, configuration.environment.pools.split(","))))
    return tuple(_check_pool("environment.pools", pool) for pool in named) or list_pools(configuration.run)


def _check_pool(setting: str, pool: str) -> str:
    try:
        return check_name(setting, pool)
    except InvalidName as error:
        raise UserError(str(error)) from error
