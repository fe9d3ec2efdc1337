"""A scenario of days: what a deployment meets that nobody looks at for a week. Pure.

Episodes take a quarter of an hour to hours. Every process of every role is restarted every few hours, the server too; at night
the players are away, on the third day the learner is for half a day; clients come and go.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.simulation.scenario.shape import FaultKind, FaultProfile, NetworkFaultRates, Pace, Scenario, ScheduledFault

DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0
STEPS_PER_DAY = 14
"""Fewer than a day has room for, so that training ends within the last one."""

NIGHT_AT = 0.55
NIGHT_SECONDS = 10 * HOUR_SECONDS
"""Of every day: nobody plays and nobody samples, for what they run on is cheaper by day or another's by night."""

PAUSE_AT_SECONDS = 3 * HOUR_SECONDS
PAUSE_SECONDS = HOUR_SECONDS
AWAY_AT_SECONDS = 2.1 * DAY_SECONDS
AWAY_SECONDS = 12 * HOUR_SECONDS

EVERY_HOURS: dict[tuple[FaultKind, str], float] = {
    ("drain", "environment"): 3.0,
    ("crash", "environment"): 5.0,
    ("drain", "inference"): 3.5,
    ("crash", "inference"): 5.5,
    ("drain", "learner"): 5.0,
    ("crash", "learner"): 4.0,
    ("drain", "recorder"): 5.0,
    ("crash", "recorder"): 4.5,
    ("restart_server", "server"): 4.0,
    ("renew_consumers", "server"): 11.0,
    ("elect", "server"): 7.0,
    ("cut", "environment"): 9.0,
    ("cut", "learner"): 13.0,
    ("pause", "environment"): 10.0,
    ("pause", "inference"): 12.0,
    ("slow_consumer", "inference"): 15.0,
    ("second_learner", "learner"): 26.0,
    ("break_disk", "recorder"): 31.0,
    ("rewind_checkpoints", "learner"): 50.0,
    ("cancel", "environment"): 17.0,
    ("drain", "monitor"): 9.0,
    ("crash", "monitor"): 8.0,
    ("visit", "session_client"): 6.0,
    ("visit", "gateway"): 7.0,
    ("visit", "rollouts"): 8.0,
    ("crash", "session_client"): 6.0,
}
"""How often each happens, in simulated hours; twice as early and as late at most."""

LONG_PAUSES = frozenset({"pause", "cut"})


def draw_days(seed: int, days: float) -> Scenario:
    """The scenario of so many days; training ends before they are over, and the rest goes on until then."""
    draw, seconds = random.Random(f"days/{seed}"), days * DAY_SECONDS
    return Scenario(
        seed=seed,
        environment_workers=2,
        inference_workers=1,
        environment_slots=8,
        inference_slots=8,
        steps=max(int(days * STEPS_PER_DAY), 1),
        groups=3,
        group_size=4,
        checkpoint_every=1,
        max_staleness=2,
        evaluation_episodes=4,
        evaluation_every=STEPS_PER_DAY,
        episode_seconds=DAY_SECONDS,
        recorder=True,
        session_clients=1,
        gateway_clients=1,
        rollout_clients=1,
        monitors=1,
        settle_seconds=120.0,
        segments=0.2,
        max_attempts=8,
        pace=Pace(
            work=1500.0, timers=10.0, lasts_seconds=seconds, horizon_seconds=seconds + DAY_SECONDS, check_seconds=60.0,
            trim_seconds=60.0, late_seconds=10.0, most_entries=MOST_ENTRIES,
        ),
        network_faults=NetworkFaultRates(
            delayed=0.01, longest_delay_seconds=1.0, publish_lost=1e-4, answer_lost=1e-4, delivery_lost=1e-3,
            delivery_repeated=1e-3, ack_lost=1e-3, call_lost=1e-3,
        ),
        fault_profile=FaultProfile(
            hang=0.001, fail=0.003, slow=0.01, odd_verdict=0.01, diverge=0.003, engine_failed=0.003, weights_rejected=0.02
        ),
        fault_schedule=tuple(sorted(_draw_faults(draw, seconds), key=lambda fault: fault.at)),
    )  # fmt: skip


MOST_ENTRIES = 2_500
"""Of what a week stores the log holds no more at any time."""


def _draw_faults(draw: random.Random, seconds: float) -> Iterator[ScheduledFault]:
    for (kind, role), hours in EVERY_HOURS.items():
        at = 0.0
        while (at := at + hours * HOUR_SECONDS * draw.uniform(0.5, 1.5)) < seconds:
            lasts = draw.uniform(20.0, 600.0) if kind in LONG_PAUSES else draw.uniform(1.0, 15.0)
            yield ScheduledFault(kind=kind, at=at, seconds=lasts, role=role, pick=draw.randrange(1 << 16))
    for day in range(int(seconds // DAY_SECONDS)):
        for role in ("environment", "inference"):
            yield ScheduledFault(kind="leave", at=(day + NIGHT_AT) * DAY_SECONDS, seconds=NIGHT_SECONDS, role=role, pick=0)
        at = day * DAY_SECONDS + PAUSE_AT_SECONDS
        yield ScheduledFault(kind="pause_requests", at=at, seconds=PAUSE_SECONDS, role="learner", pick=0)
    if seconds > AWAY_AT_SECONDS:
        yield ScheduledFault(kind="leave", at=AWAY_AT_SECONDS, seconds=AWAY_SECONDS, role="learner", pick=0)
