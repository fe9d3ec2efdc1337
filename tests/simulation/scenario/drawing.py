"""From a seed to a scenario. Pure.

Not every kind of fault takes part in every seed: with a few kinds at a time, one cannot hide what another would show.
"""

from __future__ import annotations

import math
import random

import msgspec

from tests.simulation.scenario.shape import (
    ROLES,
    ROOMY_LOG_BYTES,
    FaultKind,
    FaultProfile,
    FaultSet,
    NetworkFaultRates,
    PowerLoss,
    Scenario,
    ScheduledFault,
)

FAULT_WINDOW_SECONDS = 120.0
"""Timed faults begin in this many first seconds; a run without faults takes about as long."""

LAST_SEED_BEFORE_AHEAD = 40
"""Up to here no environment tells turns ahead, beyond it every second one does: most planted faults are known by the seeds that
found them before."""

OTHER_SEAT_SHARE = 0.5
"""Of the worlds with seats."""

TRAINED_SEAT_SHARE = 0.5
"""Of the worlds in which another policy plays one of them."""

LIMITED_SEATS_SHARE = 0.3
SEAT_LIMITS = ("seat-0.max_turns=2", "seat-1.max_turns=1", "seat-1.max_tokens=60", "seat-0.max_tokens=90\nseat-1.max_turns=2")
"""Of the worlds with seats. A turn is 8 sampled tokens and a dozen that are shown, and a first prompt some more."""

FAULT_FREE_SHARE = 0.05
CALM_LEARNERS_SHARE = 0.15

IMPATIENT_SHARE = 0.25
IMPATIENT_SECONDS = 6.0
"""The limit of an environment's idleness in some seeds: less than its slowest step takes."""

HOST_KINDS: tuple[FaultKind, ...] = ("set_clock", "fill_disk")
HOSTS_SHARE = 0.3
"""Of the seeds in which clocks are set by hours, and of those in which disks fill."""

HOSTING_SHARE = 0.5
STRANGERS_SHARE = 0.3

LATE_ROLLOUTS_SHARE = 0.4
LATE_ROLLOUTS_SECONDS = 14.0
LATE_ROLLOUTS_AT = (3.0, 20.0, 40.0)

SMALL_LOG_SHARE = 0.4
SMALL_LOG_STEPS = (3, 4, 6)
"""How many steps a small log holds; beside a recorder it has to do, for what is settled leaves."""

SMALLEST_LOG_BYTES = 400_000

TURN_BYTES = 1700
EPISODE_BYTES = 1200
"""What a turn stores, and an episode beside its turns, about."""


MANY_LANES = 80
"""More than a worker looks through in their order."""


def draw_scenario(seed: int, faults: FaultSet = "usual") -> Scenario:
    """The scenario of a seed; with all faults it is the usual one, with more clients and more that goes wrong."""
    if faults == "learners":
        return _train_both(seed)
    if faults == "rare":
        draw, scenario = random.Random(f"rare/{seed}"), draw_scenario(seed, "swarm")
        lanes = draw.choice((scenario.lanes, scenario.lanes, MANY_LANES))
        return msgspec.structs.replace(
            scenario, rare=True, lanes=lanes, strangers=1, gateways_host=True, gateway_clients=max(scenario.gateway_clients, 1)
        )
    scenario = _draw_usual(seed)
    if faults == "usual":
        return scenario
    if faults == "power":
        return _lose_power(scenario, random.Random(f"power/{seed}"))
    scenario = _add_faults(scenario, random.Random(f"all/{seed}"))
    scenario = _delay_rollouts(scenario, random.Random(f"late/{seed}"))
    scenario = _add_kinds(scenario, random.Random(f"hosts/{seed}"), HOST_KINDS, HOSTS_SHARE)
    if faults == "swarm":
        scenario = _vary_configuration(scenario, random.Random(f"swarm/{seed}"))
        hosting = random.Random(f"hosting/{seed}").random() < HOSTING_SHARE
        archive_seconds = random.Random(f"archive/{seed}").choice((0.05, 1.0, 4.0))
        scenario = _add_kinds(scenario, random.Random(f"strangers/{seed}"), ("garbage", "pause_requests"), STRANGERS_SHARE)
        scenario = _lose_reads(scenario, random.Random(f"reads/{seed}"))
        strangers = int(random.Random(f"callers/{seed}").random() < STRANGERS_SHARE)
        scenario = msgspec.structs.replace(
            scenario, gateways_host=hosting, archive_seconds=archive_seconds, strangers=strangers
        )
    return _limit_log(scenario, random.Random(f"room/{seed}"))


def _train_both(seed: int) -> Scenario:
    """One in so many seeds is calm."""
    draw = random.Random(f"learners/{seed}")
    scenario = draw_scenario(seed, draw.choice(("all", "swarm")))
    scenario = msgspec.structs.replace(
        scenario, seats=max(scenario.seats, draw.choice((2, 3))), other_seat=True, trained_seat=True
    )
    if draw.random() < CALM_LEARNERS_SHARE:
        calm = NetworkFaultRates(), FaultProfile()
        scenario = msgspec.structs.replace(scenario, network_faults=calm[0], fault_profile=calm[1], fault_schedule=())
    return msgspec.structs.replace(scenario, log_bytes=ROOMY_LOG_BYTES) if _discards_much(scenario) else scenario


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
        seats=random.Random(f"seats/{seed}").choice((0, 0, 2, 3)),
        ahead=random.Random(f"ahead/{seed}").choice((0.4, 0.8)) if seed > LAST_SEED_BEFORE_AHEAD and seed % 2 == 0 else 0.0,
    )
    is_other = scenario.seats > 0 and random.Random(f"other seat/{seed}").random() < OTHER_SEAT_SHARE
    is_trained = is_other and random.Random(f"learner of a seat/{seed}").random() < TRAINED_SEAT_SHARE
    limiting = random.Random(f"a limit of seats/{seed}")
    limits = limiting.choice(SEAT_LIMITS) if scenario.seats > 0 and limiting.random() < LIMITED_SEATS_SHARE else ""
    scenario = msgspec.structs.replace(scenario, other_seat=is_other, trained_seat=is_trained, seat_limits=limits)
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


def _add_kinds(scenario: Scenario, draw: random.Random, kinds: tuple[FaultKind, ...], share: float) -> Scenario:
    """In that share of the seeds each of these kinds takes part, too."""
    chosen = [kind for kind in kinds if draw.random() < share]
    if not chosen or not scenario.fault_schedule:
        return scenario
    added = [_draw_fault(draw, draw.choice(chosen), more=()) for _ in range(draw.randint(2, 8))]
    schedule = sorted((*scenario.fault_schedule, *added), key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, fault_schedule=tuple(each for each in schedule if each.at < scenario.heals_at))


def _lose_reads(scenario: Scenario, draw: random.Random) -> Scenario:
    """In some seeds reads go unanswered."""
    if not scenario.fault_schedule:
        return scenario
    faults = msgspec.structs.replace(scenario.network_faults, read_lost=draw.choice((0.0, 0.0, 0.002, 0.01)))
    return msgspec.structs.replace(scenario, network_faults=faults)


def _lose_power(scenario: Scenario, draw: random.Random) -> Scenario:
    """Once or twice, where something is trained and recorded."""
    everywhere = draw.random() < 0.6
    moments = sorted(draw.uniform(5.0, FAULT_WINDOW_SECONDS) for _ in range(draw.choice((1, 1, 2))))
    losses = [
        PowerLoss(
            at=at,
            lost_seconds=min(draw.choice((0.2, 2.0, 10.0, 40.0)), at),
            down_seconds=draw.choice((0.1, 2.0, 20.0)),
            everywhere=everywhere,
        )
        for at in moments
    ]
    return msgspec.structs.replace(
        scenario, power_losses=tuple(losses), recorder=draw.random() < 0.8, steps=draw.choice((4, 8)), late_copies=False
    )


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
    most_needed = 4 if scenario.other_seat else group_size  # one in four games has no verdict for the seat that is trained
    return msgspec.structs.replace(
        scenario,
        steps=steps,
        groups=groups,
        group_size=group_size,
        min_group_size=min(draw.randint(2, group_size), most_needed),
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
    if not scenario.recorder or _discards_much(scenario) or draw.random() > SMALL_LOG_SHARE:
        return scenario
    turns = sum(min(each, scenario.max_turns) for each in scenario.turns) / len(scenario.turns)
    step_bytes = scenario.groups * scenario.group_size * int(EPISODE_BYTES + TURN_BYTES * turns)
    return msgspec.structs.replace(scenario, log_bytes=max(draw.choice(SMALL_LOG_STEPS) * step_bytes, SMALLEST_LOG_BYTES))


def _discards_much(scenario: Scenario) -> bool:
    """True where most groups are good for nothing: a seat that seldom acts trains few of them."""
    acts_seldom = scenario.trained_seat and (scenario.max_turns < 6 or scenario.group_size < 4)
    return scenario.dynamic_sampling or scenario.min_group_size > 2 or acts_seldom
