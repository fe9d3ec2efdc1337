"""The server's clock as a client keeps it: it wins over a wrong local clock at once, and goes back only where it was set."""

from __future__ import annotations

import time

import pytest

from fleetbus.bus.nats.clock import MAX_SAMPLES, ServerClock

HOUR_NS = 3600 * 1_000_000_000
SECOND_NS = 1_000_000_000


def learn(clock: ServerClock, server_ns: int, *, trip_ns: int = 1000) -> None:
    now = time.monotonic_ns()
    clock.learn(now - trip_ns, now, server_ns)


def test_a_local_clock_that_is_hours_ahead_does_no_harm_once_the_server_is_heard() -> None:
    clock = ServerClock()
    server_ns = clock.now_ns() - HOUR_NS  # asked before the server was heard
    learn(clock, server_ns)
    assert abs(clock.now_ns() - server_ns) < 60 * SECOND_NS


@pytest.mark.parametrize("set_ns", [-5 * HOUR_NS, -2 * SECOND_NS, 2 * SECOND_NS, 5 * HOUR_NS])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_server_whose_clock_is_set_sets_ours_with_the_next_measurement(set_ns: int, is_restarted: bool) -> None:
    """One that stood still until the server had caught up refused for hours what others asked for with a deadline."""
    clock = ServerClock()
    for _ in range(MAX_SAMPLES):
        learn(clock, 10 * HOUR_NS)
    clock.now_ns()
    if is_restarted:
        clock.forget()
    learn(clock, 10 * HOUR_NS + set_ns, trip_ns=SECOND_NS // 10)
    assert abs(clock.now_ns() - 10 * HOUR_NS - set_ns) < SECOND_NS


def test_a_measurement_that_is_a_little_behind_does_not_set_ours_back() -> None:
    clock = ServerClock()
    learn(clock, 10 * HOUR_NS)
    before = clock.now_ns()
    clock.forget()
    learn(clock, 10 * HOUR_NS - SECOND_NS // 2)
    assert before <= clock.now_ns() < before + 60 * SECOND_NS


def test_of_several_measurements_the_one_with_the_shortest_trip_counts() -> None:
    clock = ServerClock()
    learn(clock, 10 * HOUR_NS)
    learn(clock, 10 * HOUR_NS + SECOND_NS // 2, trip_ns=SECOND_NS)
    assert abs(clock.now_ns() - 10 * HOUR_NS) < SECOND_NS // 4
