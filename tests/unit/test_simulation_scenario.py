"""Scenarios are drawn from their seed alone, and the seeds together cover every kind of fault."""

from __future__ import annotations

from typing import get_args

from tests.simulation.scenario.drawing import ADDED_WEIGHTS, HOST_KINDS, draw_scenario
from tests.simulation.scenario.shape import ROLES, FaultKind, FaultProfile, NetworkFaultRates

SEEDS = range(200)


def test_a_seed_draws_the_same_scenario_every_time() -> None:
    assert draw_scenario(17) == draw_scenario(17)
    assert draw_scenario(17) != draw_scenario(18)


def test_every_kind_of_fault_happens_to_every_role() -> None:
    happened = {(happening.kind, happening.role) for seed in SEEDS for happening in draw_scenario(seed).fault_schedule}
    assert happened >= {(kind, role) for kind in ("crash", "pause", "cut", "drain") for role in ROLES}
    of_days, of_drawn_configurations = {"leave", "visit"}, {"garbage", "pause_requests"}
    kinds = set(get_args(FaultKind)) - of_days - of_drawn_configurations
    assert {kind for kind, _ in happened} == kinds - set(ADDED_WEIGHTS) - set(HOST_KINDS)
    added = {happening.kind for seed in SEEDS for happening in draw_scenario(seed, "all").fault_schedule}
    assert added == kinds
    assert of_drawn_configurations <= {fault.kind for seed in SEEDS for fault in draw_scenario(seed, "swarm").fault_schedule}


def test_every_rate_is_zero_in_some_seeds_and_not_in_others() -> None:
    scenarios = {faults: [draw_scenario(seed, faults) for seed in SEEDS] for faults in ("all", "swarm")}
    for part in ("network_faults", "fault_profile"):
        for rate in set(getattr(scenarios["all"][0], part).__struct_fields__) - {"tool_error", "longest_late_seconds"}:
            drawn = scenarios["swarm" if rate == "read_lost" else "all"]
            values = {getattr(getattr(scenario, part), rate) for scenario in drawn}
            assert len(values) > 1, f"{part}.{rate} never changes"


def test_some_seeds_have_no_duplicate_window_and_some_have_no_faults_at_all() -> None:
    scenarios = [draw_scenario(seed) for seed in SEEDS]
    assert any(scenario.duplicate_window_seconds == 0 for scenario in scenarios)
    quiet = [each for each in scenarios if each.network_faults == NetworkFaultRates() and each.fault_profile == FaultProfile()]
    assert any(not scenario.fault_schedule for scenario in quiet)
    assert all(happening.at >= 0 for scenario in scenarios for happening in scenario.fault_schedule)
