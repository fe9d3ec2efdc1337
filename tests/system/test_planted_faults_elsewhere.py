"""Faults planted where the simulation is blind: the bus over NATS, the trainer, a checkpoint's index, an operator's edits.

Each names the test that finds it, which runs with all others and fails here, in a process of its own, because of the plant.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import planted_in_bus as bus
from tests.support import planted_in_trainer as trainer
from tests.support.plant import VARIABLE

ROOT = Path(__file__).parents[2]
PLUGIN = "tests.support.plant"
LIMIT_SECONDS = 240

pytestmark = [pytest.mark.integration, pytest.mark.timeout(LIMIT_SECONDS + 20)]

Plant = Callable[[pytest.MonkeyPatch], None]


class Finder(NamedTuple):
    """A test that runs regularly, and a word of what it says when it finds the fault."""

    test: str
    says: str


TRAINER = "tests/unit/torch_trainer/test_torch_trainer.py::"
PUBLISH, PULL, TRIM = (f"tests/contract/test_bus_{name}.py::" for name in ("publish", "pull", "trim"))
RECREATED = "tests/system/test_log_recreated.py::"

PLANTS: dict[Plant, Finder] = {
    bus.expectations_not_sent: Finder(
        f"{PUBLISH}test_compare_and_set_stores_once_and_refuses_the_second[nats]", "DID NOT RAISE"
    ),
    bus.ids_made_anew: Finder(f"{PUBLISH}test_a_repeated_id_stores_nothing_new[nats]", "AssertionError"),
    bus.credits_lost_at_a_reconnect: Finder(
        f"{PULL}test_after_a_break_the_remaining_credits_are_asked_for_again[nats]", "TimeoutError"
    ),
    bus.what_was_not_taken_kept: Finder(f"{PULL}test_a_leaving_worker_hands_back_what_it_did_not_take[nats]", "TimeoutError"),
    bus.leases_not_extended: Finder(
        f"{PULL}test_extending_keeps_a_lease_and_its_end_gives_the_work_away[nats]", "AssertionError"
    ),
    bus.purge_one_too_far: Finder(
        f"{TRIM}test_a_purge_removes_its_subject_below_its_sequence_and_nothing_else[nats]", "AssertionError"
    ),
    bus.log_taken_for_the_same: Finder(
        f"{RECREATED}test_who_reads_a_log_that_was_emptied_and_made_anew_meanwhile_is_told[3]", "TimeoutError"
    ),
    bus.position_given_again_not_told: Finder(
        f"{RECREATED}test_who_stored_what_was_lost_is_told_although_nothing_is_lost_that_it_read[when it stores the next one]",
        "TimeoutError",
    ),
    bus.edits_of_the_stream_not_seen: Finder(
        "tests/system/test_odd_nats_servers.py::test_a_stream_that_would_lose_entries_is_taken_for_no_log", "DID NOT RAISE"
    ),
    trainer.moments_not_restored: Finder(f"{TRAINER}test_a_restored_trainer_goes_on_bit_by_bit", "assert"),
    trainer.warmup_begins_anew: Finder(f"{TRAINER}test_a_restored_trainer_goes_on_bit_by_bit", "assert"),
    trainer.gradients_kept: Finder(f"{TRAINER}test_a_restored_trainer_goes_on_bit_by_bit", "assert"),
    trainer.temperature_of_the_sampler_ignored: Finder(
        f"{TRAINER}test_the_temperature_of_the_sampler_is_that_of_the_ratio", "assert"
    ),
    trainer.prefix_without_gradient: Finder(
        f"{TRAINER}test_the_gradient_is_that_of_plain_forward_passes_over_whole_sequences", "assert"
    ),
    trainer.loss_averaged_by_micro_batch: Finder(f"{TRAINER}test_how_the_batch_is_cut_does_not_change_the_gradient", "assert"),
    trainer.index_of_a_checkpoint_believed: Finder(
        "tests/system/test_checkpoints_unread.py::test_a_checkpoint_whose_floor_was_altered_is_not_begun_at", "assert"
    ),
}

SAMPLE: tuple[Plant, ...] = (bus.expectations_not_sent, bus.log_taken_for_the_same, trainer.moments_not_restored)
"""One of each kind, in every run of the integration tests; all others are slow."""


@pytest.mark.parametrize("plant", SAMPLE, ids=lambda plant: plant.__name__)
def test_a_test_that_runs_regularly_finds(plant: Plant) -> None:
    assert_found(plant)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant not in SAMPLE], ids=lambda plant: plant.__name__)
def test_a_test_finds(plant: Plant) -> None:
    """As above."""
    assert_found(plant)


def assert_found(plant: Plant) -> None:
    test, says = PLANTS[plant]
    status, output = run_planted(test, plant)
    assert "TypeError" not in output and "AttributeError" not in output, f"{plant.__name__} does not fit: {output}"
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert says in output, output


def run_planted(test: str, plant: Plant) -> tuple[int, str]:
    """Exit status and output of pytest on this test, whatever group it is of."""
    module = plant.__module__.rpartition(".")[2]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-m", "slow or not slow", "--timeout", "200", "-p", PLUGIN, test],
        cwd=ROOT,
        env=os.environ | {VARIABLE: f"{module}:{plant.__name__}", "FLEETBUS_TEST_SERVER": "keyed"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr
