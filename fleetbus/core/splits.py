"""Train and held-out tasks, told apart by the hash of their keys: no state, no randomness, and exact counts per environment."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence

from schemas import Task


def split_tasks(
    tasks: Sequence[Task], *, eval_ratio: float = 0.10, max_eval: int = 30, min_eval: int = 1
) -> tuple[list[Task], list[Task]]:
    """Train tasks and held-out tasks, both in the order of ``tasks``.

    Of each environment's n tasks, those with the lowest hashes are held out: ``eval_ratio`` of n, at most ``max_eval``, at
    least ``min_eval``, and never all of them. A task changes sides only if tasks that come or go move the boundary over it.
    """
    if not 0 <= eval_ratio <= 1:
        raise ValueError(f"eval_ratio {eval_ratio} is not between 0 and 1")
    by_environment: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        by_environment[task.env].append(task.key)
    held_out = set()
    for environment, keys in by_environment.items():
        count = _eval_count(len(keys), eval_ratio, max_eval, min_eval)
        held_out |= {(environment, key) for key in sorted(keys, key=_hash_order)[:count]}
    train = [task for task in tasks if (task.env, task.key) not in held_out]
    return train, [task for task in tasks if (task.env, task.key) in held_out]


def key_hash(key: str) -> float:
    """Where a key falls in [0, 1): the first eight bytes of its MD5, as Fleet's data preparation has it."""
    digest = hashlib.md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)


def _hash_order(key: str) -> tuple[float, str]:
    return key_hash(key), key


def _eval_count(count: int, ratio: float, most: int, least: int) -> int:
    wanted = math.floor(count * ratio + 1e-9)  # 0.29 * 100 is 28.999...
    return max(0, min(max(wanted, least), most, count - 1))
