"""Draws the faults that strike a fleet, and their times: a plan that depends on a seed and the length of the run alone. Pure.

Environment and inference workers are struck every `MEAN_SECONDS` on average, the learner and the server at most twice per run,
the first time by SIGKILL. Members are picked by a number in [0, 1), because who is there is known only when the time has come.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

MEAN_SECONDS = 3.0
RESTART_SECONDS = (0.2, 1.5)
"""How long a supervisor takes to start again what ended."""

PAUSE_SECONDS = {"environment": (1.0, 14.0), "inference": (1.0, 8.0), "learner": (1.0, 8.0), "server": (0.5, 4.0)}
"""Some pauses are longer than the leases of what the worker holds, some than that of its lane."""

SECONDS_PER_RARE_FAULT = 60.0
MOST_RARE_FAULTS = 2

ROUND_SECONDS = 10.0
"""With several learners: in so many seconds one of each kind of worker is killed."""

FaultRole = Literal["environment", "inference", "learner", "server"]
FaultKind = Literal["kill", "pause", "terminate"]
KILLS_APART: tuple[tuple[FaultRole, float], ...] = (
    ("environment", 16.0),
    ("inference", 9.0),
    ("environment", 16.0),
    ("learner", 20.0),
    ("inference", 9.0),
    ("server", 8.0),
)
"""The roles that `plan_kills` goes through, and the seconds until the next kill."""

_KINDS: tuple[FaultKind, ...] = ("kill", "pause", "terminate")
_WEIGHTS = (5, 3, 2)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds`` is how long a pause lasts, or from the end of the process until it is started again. ``policy``: of its
    members alone; empty: of all in the role."""

    at_seconds: float
    role: FaultRole
    kind: FaultKind
    pick: float
    seconds: float
    policy: str = ""


def plan_faults(seed: int, seconds: float, *, mean_seconds: float = MEAN_SECONDS) -> list[Fault]:
    """The faults of a run of that many seconds, in order of time."""
    random_numbers = random.Random(seed)
    faults = _draw_worker_faults(random_numbers, seconds, mean_seconds)
    for role in ("learner", "server"):
        faults += _draw_rare_faults(random_numbers, seconds, role)
    return sorted(faults, key=lambda fault: fault.at_seconds)


def plan_kills(seed: int, seconds: float) -> list[Fault]:
    """Kills alone, one role after another, each when the one before has had its time to recover: what recovery takes."""
    random_numbers = random.Random(seed)
    faults: list[Fault] = []
    at, turn = 2.0, 0
    while at < seconds:
        role, apart = KILLS_APART[turn % len(KILLS_APART)]
        faults.append(_draw_fault(random_numbers, at, role, "kill"))
        at, turn = at + apart, turn + 1
    return faults


def plan_kills_by_policy(seed: int, seconds: float, policies: Sequence[str], every: float = ROUND_SECONDS) -> list[Fault]:
    """In every so many seconds an environment worker, an inference worker of each policy and one of the learners, in turn."""
    random_numbers = random.Random(seed)
    faults: list[Fault] = []
    for number in range(int(seconds / every)):
        learner = policies[number % len(policies)]
        struck: list[tuple[FaultRole, str]] = [("learner", learner), ("environment", "")]
        struck += [("inference", policy) for policy in policies]
        for place, (role, policy) in enumerate(struck):
            at = every * (number + place / len(struck))
            fault = _draw_fault(random_numbers, at, role, "kill")
            faults.append(msgspec.structs.replace(fault, policy=policy))
    return faults


def _draw_worker_faults(random_numbers: random.Random, seconds: float, mean_seconds: float) -> list[Fault]:
    faults: list[Fault] = []
    at = random_numbers.expovariate(1 / mean_seconds)
    while at < seconds:
        role: FaultRole = random_numbers.choice(("environment", "inference"))
        faults.append(_draw_fault(random_numbers, at, role, random_numbers.choices(_KINDS, _WEIGHTS)[0]))
        at += random_numbers.expovariate(1 / mean_seconds)
    return faults


def _draw_rare_faults(random_numbers: random.Random, seconds: float, role: FaultRole) -> list[Fault]:
    """One per equal part of the run, none in its first fifth: there the fleet begins."""
    count = min(MOST_RARE_FAULTS, math.ceil(seconds / SECONDS_PER_RARE_FAULT))
    begin, part = seconds / 5, seconds * 4 / 5 / max(count, 1)
    return [
        _draw_fault(
            random_numbers,
            begin + part * (index + random_numbers.random()),
            role,
            "kill" if index == 0 else random_numbers.choice(_KINDS),
        )
        for index in range(count)
    ]


def _draw_fault(random_numbers: random.Random, at: float, role: FaultRole, kind: FaultKind) -> Fault:
    bounds = PAUSE_SECONDS[role] if kind == "pause" else RESTART_SECONDS
    return Fault(at_seconds=at, role=role, kind=kind, pick=random_numbers.random(), seconds=random_numbers.uniform(*bounds))
