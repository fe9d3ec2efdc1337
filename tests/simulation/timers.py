"""Timers of workers as scenarios of days have them: what they do every second comes several times as late, and leases with it.

A week of heartbeats every two seconds costs minutes, and shows nothing that a day of them does not. What counts hours stays as
it is: deadlines, sweeps, retention, the window of ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fleetbus.bus.streams as streams
import fleetbus.client.session_hosts as session_hosts
import fleetbus.delivery.lanes as lanes
import fleetbus.delivery.requests as requests
import fleetbus.delivery.worker_lifecycle as lifecycle
import fleetbus_workers.environment.worker as environment
import fleetbus_workers.inference.observation_handler as observations
import fleetbus_workers.inference.worker as inference
import fleetbus_workers.observe.run.run_observer as run_observer
import fleetbus_workers.recorder.worker as recorder
import tests.simulation.clients.sessions as sessions
import tests.simulation.deployment.endings as endings
import tests.simulation.judge.oracle as oracle
import tests.simulation.world as world

TIMERS = (
    (lifecycle, "HEARTBEAT_SECONDS"),
    (lanes, "LEASE_SECONDS"),
    (lanes, "MAX_LEASE_SECONDS"),
    (session_hosts, "LOST_AFTER_SECONDS"),
    (recorder, "LEASE_SECONDS"),
    (run_observer, "LOOK_SECONDS"),
    (requests, "EXPIRY_CHECK_SECONDS"),
    (streams, "TASK_LEASE_SECONDS"),
    (streams, "OBSERVATION_LEASE_SECONDS"),
    (streams, "ACTION_LEASE_SECONDS"),
    (environment, "TASK_LEASE_SECONDS"),
    (inference, "OBSERVATION_LEASE_SECONDS"),
    (observations, "OBSERVATION_LEASE_SECONDS"),
    (endings, "LANE_SECONDS"),
    (endings, "LONGEST_EFFECT_SECONDS"),
    (oracle, "LEASE_MARGIN_SECONDS"),
    (oracle, "OBSERVATION_LEASE_SECONDS"),
    (oracle, "STOP_SECONDS"),
    (oracle, "UNANSWERED_SECONDS"),
    (oracle, "OUTCOME_MARGIN_SECONDS"),
    (world, "LEAVE_SECONDS"),
    (sessions, "CALL_SECONDS"),
)
"""Each under the name by which it is used, and the judges' bounds that follow from them."""


@contextmanager
def slowed_timers(factor: float) -> Iterator[None]:
    """All of them so many times as long."""
    before = [vars(module)[name] for module, name in TIMERS]
    try:
        for (module, name), seconds in zip(TIMERS, before, strict=True):
            setattr(module, name, seconds * factor)
        yield
    finally:
        for (module, name), seconds in zip(TIMERS, before, strict=True):
            setattr(module, name, seconds)
