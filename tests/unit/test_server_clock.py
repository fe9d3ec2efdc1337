"""The server's clock as a client keeps it: it wins over a wrong local clock at once, and then never steps back."""

from __future__ import annotations

import time

from fleetbus.bus.nats.clock import ServerClock

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


def test_a_server_whose_clock_is_set_back_stops_ours_until_it_has_caught_up() -> None:
    clock = ServerClock()
    learn(clock, 10 * HOUR_NS)
    before = clock.now_ns()
    clock.forget()
    learn(clock, 9 * HOUR_NS)
    assert before <= clock.now_ns() < before + 60 * SECOND_NS
    clock.forget()
    learn(clock, 12 * HOUR_NS)
    assert abs(clock.now_ns() - 12 * HOUR_NS) < 60 * SECOND_NS


def test_of_several_measurements_the_one_with_the_shortest_trip_counts() -> None:
    clock = ServerClock()
    learn(clock, 10 * HOUR_NS)
    learn(clock, 11 * HOUR_NS, trip_ns=SECOND_NS)
    assert abs(clock.now_ns() - 10 * HOUR_NS) < 60 * SECOND_NS
