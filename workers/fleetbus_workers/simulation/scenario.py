"""From a seed to a scenario: size of the deployment, network faults, fault schedule. Pure.

Not every kind of fault takes part in every seed: with a few kinds at a time, one cannot hide what another would show.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

FaultKind = Literal[
    "crash",
    "pause",
    "cut",
    "drain",
    "join",
    "restart_server",
    "second_learner",
    "fill_log",
    "cancel",
    "spoil_checkpoint",
    "elect",
    "step_clock",
    "renew_consumers",
    "slow_consumer",
    "fill_lanes",
    "break_disk",
    "lose_checkpoints",
    "rewind_checkpoints",
    "garbage",
    "pause_requests",
]
"""The last ten take part with ``faults="all"`` only, and the last two of them with drawn configurations."""

FaultSet = Literal["usual", "all", "swarm"]
"""``swarm``: all faults, and a configuration that is drawn, too: tiny limits, short deadlines, few lanes, long episodes."""

ROLES = ("environment", "inference", "learner")
"""Roles that every fleet has; some have a recorder, too."""

FAULT_WINDOW_SECONDS = 120.0
"""Timed faults begin in this many first seconds; a run without faults takes about as long."""

FAULT_FREE_SHARE = 0.05

IMPATIENT_SHARE = 0.25
IMPATIENT_SECONDS = 6.0
"""The limit of an environment's idleness in some seeds: less than its slowest step takes."""


HOSTING_SHARE = 0.5
STRANGERS_SHARE = 0.3

LATE_ROLLOUTS_SHARE = 0.4
LATE_ROLLOUTS_SECONDS = 14.0
LATE_ROLLOUTS_AT = (3.0, 20.0, 40.0)

ROOMY_LOG_BYTES = 1 << 30
"""More than any run stores."""

SMALL_LOG_SHARE = 0.4
SMALL_LOG_STEPS = (3, 4, 6)
"""How many steps a small log holds; beside a recorder it has to do, for what is settled leaves."""

SMALLEST_LOG_BYTES = 400_000

TURN_BYTES = 1700
EPISODE_BYTES = 1200
"""What a turn stores, and an episode beside its turns, about."""


class ScheduledFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault at ``at`` seconds; ``pick`` selects the target among the processes alive then."""

    kind: FaultKind
    at: float
    seconds: float
    role: str
    pick: int


class NetworkFaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities per event on the network, and the longest delay in seconds."""

    delayed: float = 0.0
    longest_delay_seconds: float = 0.0
    publish_lost: float = 0.0
    answer_lost: float = 0.0
    delivery_lost: float = 0.0
    delivery_repeated: float = 0.0
    ack_lost: float = 0.0
    call_lost: float = 0.0
    publish_late: float = 0.0
    """Messages that are stored up to ``longest_late_seconds`` after they were sent, whatever their sender did meanwhile."""
    longest_late_seconds: float = 20.0
    read_behind: float = 0.0
    """Reads that a replica answers which is up to ``longest_lag_seconds`` behind."""
    longest_lag_seconds: float = 1.5


class FaultProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities of what environments and engines do: per stage of an environment, per episode, per turn."""

    hang: float = 0.0
    fail: float = 0.0
    slow: float = 0.0
    odd_verdict: float = 0.0
    tool_error: float = 0.1
    diverge: float = 0.0
    engine_failed: float = 0.0
    weights_rejected: float = 0.0
    poison_episode: float = 0.0
    poison_observation: float = 0.0


CALM = FaultProfile()


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one simulated run that its seed decides beforehand.

    ``settle_seconds``: what was settled for so long leaves the log. ``late_copies``: copies of requests that left it are stored
    again. In groups of two, one failure leaves a group without a baseline. ``blocking_seconds``: the longest half of what
    training, saving weights or writing a checkpoint takes. ``heals_at``: from then on nothing more goes wrong, and every
    wait has a bound. ``segments``: share of steps after which an environment changes the policy's context. ``gateways_host``:
    gateways have environments in their own process. ``archive_seconds``: the longest half of what a write of the archive takes.
    """

    seed: int
    environment_workers: int = 2
    inference_workers: int = 2
    environment_slots: int = 16
    inference_slots: int = 16
    steps: int = 4
    groups: int = 5
    group_size: int = 4
    checkpoint_every: int = 2
    max_staleness: int = 1
    evaluation_episodes: int = 4
    duplicate_window_seconds: float = 120.0
    drain_seconds: float = 20.0
    idle_seconds: float = 1800.0
    blocking_seconds: float = 1.0
    replayable: bool = True
    recorder: bool = False
    session_clients: int = 0
    gateway_clients: int = 0
    gateways_host: bool = False
    archive_seconds: float = 0.05
    rollout_clients: int = 0
    session_slots: int = 8
    weights_in_bucket: bool = False
    evaluation_every: int = 0
    lanes: int = 12
    episode_seconds: float = 600.0
    stale_groups: Literal["drop", "keep", "wait"] = "drop"
    dynamic_sampling: bool = False
    mask_truncated: bool = False
    credit_per_turn: bool = False
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch"] = "grpo"
    max_attempts: int = 3
    max_turns: int = 6
    turns: tuple[int, ...] = (2, 3, 4, 4, 5, 6, 7)
    exclusions_per_entry: int = 0
    tasks: int = 24
    eval_greedy: bool = True
    min_group_size: int = 2
    heals_at: float = math.inf
    settle_seconds: float = 30.0
    late_copies: bool = False
    network_faults: NetworkFaultRates = NetworkFaultRates()
    fault_profile: FaultProfile = FaultProfile()
    fault_schedule: tuple[ScheduledFault, ...] = ()
    segments: float = 0.0
    compaction: Literal["off", "drop", "summarise"] = "off"
    log_bytes: int = ROOMY_LOG_BYTES


def draw_scenario(seed: int, faults: FaultSet = "usual") -> Scenario:
    """The scenario of a seed; with all faults it is the usual one, with more clients and more that goes wrong."""
    scenario = _draw_usual(seed)
    if faults == "usual":
        return scenario
    scenario = _add_faults(scenario, random.Random(f"all/{seed}"))
    scenario = _delay_rollouts(scenario, random.Random(f"late/{seed}"))
    if faults == "swarm":
        scenario = _vary_configuration(scenario, random.Random(f"swarm/{seed}"))
        hosting = random.Random(f"hosting/{seed}").random() < HOSTING_SHARE
        archive_seconds = random.Random(f"archive/{seed}").choice((0.05, 1.0, 4.0))
        scenario = _add_strangers(scenario, random.Random(f"strangers/{seed}"))
        scenario = msgspec.structs.replace(scenario, gateways_host=hosting, archive_seconds=archive_seconds)
    return _limit_log(scenario, random.Random(f"room/{seed}"))


def _draw_usual(seed: int) -> Scenario:
    draw, contexts = random.Random(f"scenario/{seed}"), random.Random(f"contexts/{seed}")
    groups, group_size = draw.choice(((5, 4), (5, 4), (10, 2)))
    scenario = Scenario(
        seed=seed,
        environment_workers=draw.randint(2, 3),
        inference_workers=draw.randint(2, 3),
        environment_slots=draw.choice((6, 12, 24)),
        inference_slots=draw.choice((4, 8, 24)),
        groups=groups,
        group_size=group_size,
        checkpoint_every=draw.randint(1, 3),
        max_staleness=draw.randint(0, 2),
        duplicate_window_seconds=draw.choice((0.0, 0.0, 120.0)),
        drain_seconds=draw.choice((1.0, 5.0, 20.0)),
        replayable=draw.random() < 0.65,
        recorder=draw.random() < 0.3,
        blocking_seconds=draw.choice((0.2, 1.0, 4.0)),
        segments=contexts.choice((0.0, 0.0, 0.2, 0.5)),
        compaction=contexts.choice(("off", "off", "off", "drop", "summarise")),
    )
    settling = random.Random(f"settling/{seed}")
    scenario = msgspec.structs.replace(
        scenario, settle_seconds=settling.choice((3.0, 10.0, 30.0)), late_copies=scenario.recorder and settling.random() < 0.7
    )
    if draw.random() < FAULT_FREE_SHARE:
        return scenario
    return msgspec.structs.replace(
        scenario,
        network_faults=_draw_network_faults(draw),
        fault_profile=_draw_fault_profile(draw),
        fault_schedule=_draw_fault_schedule(draw, recorder=scenario.recorder),
        idle_seconds=IMPATIENT_SECONDS if draw.random() < IMPATIENT_SHARE else scenario.idle_seconds,
    )


def _draw_network_faults(draw: random.Random) -> NetworkFaultRates:
    def rate(highest: float) -> float:
        return draw.choice((0.0, highest * 0.1, highest))

    return NetworkFaultRates(
        delayed=rate(0.3),
        longest_delay_seconds=draw.choice((0.05, 0.5, 1.5)),
        publish_lost=rate(0.03),
        answer_lost=rate(0.03),
        delivery_lost=rate(0.02),
        delivery_repeated=rate(0.02),
        ack_lost=rate(0.05),
        call_lost=rate(0.1),
    )


def _draw_fault_profile(draw: random.Random) -> FaultProfile:
    def rate(highest: float) -> float:
        return draw.choice((0.0, 0.0, highest * 0.2, highest))

    return FaultProfile(
        hang=rate(0.01),
        fail=rate(0.01),
        slow=rate(0.05),
        odd_verdict=rate(0.05),
        diverge=rate(0.02),
        engine_failed=rate(0.02),
        weights_rejected=rate(0.2),
        poison_episode=rate(0.02),
        poison_observation=rate(0.01),
    )


def _draw_fault_schedule(draw: random.Random, *, recorder: bool) -> tuple[ScheduledFault, ...]:
    weights: dict[FaultKind, float] = {
        "crash": 4,
        "pause": 2,
        "cut": 2,
        "drain": 2,
        "join": 1,
        "restart_server": 2,
        "second_learner": 1,
        "fill_log": 0.5,
        "cancel": 1,
        "spoil_checkpoint": 0.5,
    }
    kinds = [kind for kind in weights if draw.random() < 0.6] or ["crash"]
    fault_schedule = [
        _draw_fault(draw, draw.choices(kinds, [weights[kind] for kind in kinds])[0], more=("recorder",) if recorder else ())
        for _ in range(draw.randint(1, 10))
    ]
    return tuple(sorted(fault_schedule, key=lambda happening: happening.at))


ADDED_WEIGHTS: dict[FaultKind, float] = {
    "elect": 2,
    "step_clock": 1,
    "renew_consumers": 1,
    "slow_consumer": 2,
    "fill_lanes": 0.5,
    "break_disk": 2,
    "lose_checkpoints": 0.7,
    "rewind_checkpoints": 0.5,
}


def _add_faults(scenario: Scenario, draw: random.Random) -> Scenario:
    scenario = msgspec.structs.replace(
        scenario,
        session_clients=draw.choice((0, 0, 1, 3)),
        gateway_clients=draw.choice((0, 0, 1, 2)),
        rollout_clients=draw.choice((0, 0, 1)),
        session_slots=draw.choice((2, 8)),
        weights_in_bucket=draw.random() < 0.5,
        evaluation_every=draw.choice((0, 0, 1, 2)),
        recorder=scenario.recorder or draw.random() < 0.4,
        stale_groups=draw.choice(("drop", "drop", "keep", "wait")),
        dynamic_sampling=draw.random() < 0.3,
        mask_truncated=draw.random() < 0.2,
        credit_per_turn=draw.random() < 0.3,
    )
    if not scenario.fault_schedule:
        return scenario
    heals_at = draw.choice((math.inf, draw.uniform(30.0, FAULT_WINDOW_SECONDS)))
    clients = {
        "session_client": scenario.session_clients,
        "gateway": scenario.gateway_clients,
        "rollouts": scenario.rollout_clients,
    }
    more = (*(("recorder",) if scenario.recorder else ()), *(role for role, count in clients.items() if count))
    weights: dict[FaultKind, float] = {**ADDED_WEIGHTS, "crash": 1, "pause": 1, "cut": 1}
    kinds: list[FaultKind] = [kind for kind in weights if draw.random() < 0.5] or ["elect"]
    added = [
        _draw_fault(draw, draw.choices(kinds, [weights[kind] for kind in kinds])[0], more=more)
        for _ in range(draw.randint(1, 8))
    ]
    schedule = sorted([*scenario.fault_schedule, *added], key=lambda fault: fault.at)
    return msgspec.structs.replace(
        scenario,
        heals_at=heals_at,
        network_faults=msgspec.structs.replace(
            scenario.network_faults,
            publish_late=draw.choice((0.0, 0.0, 0.01, 0.05)),
            read_behind=draw.choice((0.0, 0.05, 0.5)),
            longest_lag_seconds=draw.choice((0.1, 0.5, 1.5)),
        ),
        fault_schedule=tuple(fault for fault in schedule if fault.at < heals_at),
    )


def _delay_rollouts(scenario: Scenario, draw: random.Random) -> Scenario:
    """In some seeds rollouts are stopped for so long that what they have to read has left the log, and is in the archive."""
    if not (scenario.rollout_clients and scenario.recorder and scenario.fault_schedule) or draw.random() > LATE_ROLLOUTS_SHARE:
        return scenario
    stops = [
        ScheduledFault(kind="pause", at=at + draw.random(), seconds=LATE_ROLLOUTS_SECONDS, role="rollouts", pick=0)
        for at in LATE_ROLLOUTS_AT
        if at + 1 < scenario.heals_at
    ]
    schedule = tuple(sorted((*scenario.fault_schedule, *stops), key=lambda fault: fault.at))
    return msgspec.structs.replace(scenario, settle_seconds=3.0, fault_schedule=schedule)


def _add_strangers(scenario: Scenario, draw: random.Random) -> Scenario:
    """In some seeds somebody writes what is no message, or has the learner pause."""
    kinds: list[FaultKind] = [kind for kind in ("garbage", "pause_requests") if draw.random() < STRANGERS_SHARE]
    if not kinds or not scenario.fault_schedule:
        return scenario
    added = [_draw_fault(draw, draw.choice(kinds), more=()) for _ in range(draw.randint(2, 8))]
    schedule = sorted((*scenario.fault_schedule, *added), key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, fault_schedule=tuple(each for each in schedule if each.at < scenario.heals_at))


def _draw_fault(draw: random.Random, kind: FaultKind, *, more: tuple[str, ...]) -> ScheduledFault:
    return ScheduledFault(
        kind=kind,
        at=round(draw.uniform(0, FAULT_WINDOW_SECONDS), 3),
        seconds=round(draw.choice((0.3, 3.0, 14.0)) * draw.uniform(0.5, 1.0), 3),
        role=draw.choice((*ROLES, *more)),
        pick=draw.randrange(1000),
    )


MOST_TURNS = 1200
"""What a drawn configuration plays in its calm training, about, so that a run takes seconds."""


def _vary_configuration(scenario: Scenario, draw: random.Random) -> Scenario:
    max_turns = draw.choice((1, 2, 6, 6, 12, 40))
    groups, group_size = draw.choice(((1, 2), (1, 8), (2, 3), (4, 4), (8, 2)))
    steps = min(draw.choice((1, 2, 4, 8, 20)), 1 + MOST_TURNS // (groups * group_size * max_turns))
    slots = draw.choice((1, 2, 5, 40))
    has_time = max_turns > 6 or slots < 5  # for what it has to play; with less, nothing would ever be trained
    return msgspec.structs.replace(
        scenario,
        steps=steps,
        groups=groups,
        group_size=group_size,
        min_group_size=draw.randint(2, group_size),
        environment_slots=slots,
        inference_slots=draw.choice((1, 2, 5, 40)),
        checkpoint_every=draw.choice((1, 1, 2, 5)),
        max_staleness=draw.choice((0, 0, 1, 4)),
        evaluation_episodes=draw.choice((0, 1, 4)),
        eval_greedy=draw.random() < 0.5,
        lanes=draw.choice((5, 8, 12)),
        episode_seconds=600.0 if has_time else draw.choice((30.0, 60.0, 600.0)),
        max_attempts=draw.choice((1, 2, 3, 3)),
        max_turns=max_turns,
        turns=(1, 2, max(max_turns - 1, 1), max_turns, max_turns + 1),
        exclusions_per_entry=draw.choice((0, 1, 5)),
        tasks=draw.choice((1, 3, 24)),
        advantage_estimator=draw.choice(("grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch")),
    )


def _limit_log(scenario: Scenario, draw: random.Random) -> Scenario:
    """A log of a few steps in some seeds with a recorder, so that what is asked for competes for its room.

    Where most groups are discarded, a step may take more than that: then the learner says that the log is too small.
    """
    discards = scenario.dynamic_sampling or scenario.min_group_size > 2
    if not scenario.recorder or discards or draw.random() > SMALL_LOG_SHARE:
        return scenario
    turns = sum(min(each, scenario.max_turns) for each in scenario.turns) / len(scenario.turns)
    step_bytes = scenario.groups * scenario.group_size * int(EPISODE_BYTES + TURN_BYTES * turns)
    return msgspec.structs.replace(scenario, log_bytes=max(draw.choice(SMALL_LOG_STEPS) * step_bytes, SMALLEST_LOG_BYTES))
