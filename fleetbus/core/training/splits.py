"""Train and held-out tasks, split by the hash of their keys: no state, no randomness, and exact counts per environment."""

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from fleetbus_schemas import Task


def split_tasks(
    tasks: Sequence[Task],
    *,
    eval_ratio: float = 0.10,
    max_eval: int = 30,
    min_eval: int = 1,
    held_out: Collection[str] = (),
    all_or_none: bool = False,
    max_eval_total: int | None = None,
    eval_floor: int = 8,
    max_env_share: float = 1.0,
) -> tuple[list[Task], list[Task]]:
    """Train tasks and held-out tasks, both in the order of ``tasks``.

    Of each environment's n tasks, those with the lowest hashes are held out: ``eval_ratio`` of n, at most ``max_eval``, at
    least ``min_eval``, and never all of them. A task changes sides only if tasks that come or go move the boundary over it.
    Environments in ``held_out``, by name or as ``MODALITY:NAME``, are held out whole.

    ``all_or_none``: an environment whose share is below ``min_eval`` gives none instead (Fleet's rule). ``max_eval_total``
    bounds all held-out tasks: of each environment ``eval_floor`` stay in any case, the rest in turns; what is over is in
    neither list. ``max_env_share`` bounds each environment's part of the train tasks, lowest hashes first, where there are
    enough environments for such shares to add up to all of them.
    """
    if not 0 <= eval_ratio <= 1:
        raise ValueError(f"eval_ratio {eval_ratio} is not between 0 and 1")
    if not 0 < max_env_share <= 1:
        raise ValueError(f"max_env_share {max_env_share} is not above 0 and at most 1")
    train: dict[str, list[str]] = {}
    evaluation: dict[str, list[str]] = {}
    whole = _group_by_environment(task for task in tasks if _is_held_out(task, held_out))
    for environment, keys in _group_by_environment(task for task in tasks if not _is_held_out(task, held_out)).items():
        count = _compute_eval_count(len(keys), eval_ratio, max_eval, min_eval, all_or_none=all_or_none)
        evaluation[environment], train[environment] = keys[:count], keys[count:]
    for environment, keys in whole.items():
        evaluation[environment] = sorted([*evaluation.get(environment, []), *keys], key=_compute_hash_order)
    evaluation = dict(sorted(evaluation.items()))
    if max_eval_total is not None:
        evaluation = _cap_round_robin(evaluation, max_eval_total, eval_floor)
    train = _cap_by_share(train, max_env_share)
    return _select_environments(tasks, train), _select_environments(tasks, evaluation)


def hash_key(key: str) -> float:
    """The place of a key in [0, 1): the first eight bytes of its MD5, as Fleet's data preparation has it."""
    digest = hashlib.md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)


def _compute_hash_order(key: str) -> tuple[float, str]:
    return hash_key(key), key


def _is_held_out(task: Task, held_out: Collection[str]) -> bool:
    return task.env in held_out or f"{task.modality}:{task.env}" in held_out


def _group_by_environment(tasks: Iterable[Task]) -> dict[str, list[str]]:
    """Keys by environment, the lowest hashes first."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        keys[task.env].append(task.key)
    return {environment: sorted(keys[environment], key=_compute_hash_order) for environment in sorted(keys)}


def _select_environments(tasks: Iterable[Task], keys: dict[str, list[str]]) -> list[Task]:
    chosen = {(environment, key) for environment, found in keys.items() for key in found}
    return [task for task in tasks if (task.env, task.key) in chosen]


def _compute_eval_count(count: int, ratio: float, most: int, least: int, *, all_or_none: bool) -> int:
    wanted = math.floor(count * ratio + 1e-9)  # 0.29 * 100 is 28.999...
    if all_or_none and min(wanted, most) < least:
        return 0
    return max(0, min(max(wanted, least), most, count - 1))


def _cap_round_robin(keys: dict[str, list[str]], limit: int, floor: int) -> dict[str, list[str]]:
    """At most ``limit`` keys: ``floor`` of each environment even beyond it, then one of each in turn."""
    if sum(map(len, keys.values())) <= limit:
        return keys
    kept = {environment: found[:floor] for environment, found in keys.items()}
    left = limit - sum(map(len, kept.values()))
    rest = [[(environment, key) for key in found[floor:]] for environment, found in keys.items()]
    in_turns = (entry for row in itertools.zip_longest(*rest) for entry in row if entry is not None)
    for environment, key in itertools.islice(in_turns, max(0, left)):
        kept[environment].append(key)
    return kept


def _cap_by_share(keys: dict[str, list[str]], share: float) -> dict[str, list[str]]:
    """At most ``share`` of all keys from one environment; with fewer environments than 1 / ``share``, an equal part."""
    present = sum(bool(found) for found in keys.values())
    if share >= 1 or present < 2:
        return keys
    most = math.ceil(sum(map(len, keys.values())) * max(share, 1 / present))
    return {environment: found[:most] for environment, found in keys.items()}
