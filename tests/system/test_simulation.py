"""The simulation itself: it repeats, it is quiet when nothing happens, and ten drawn scenarios keep all invariants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fleetbus.core.audit.findings import Findings
from tests.simulation.__main__ import main as simulate
from tests.simulation.run import run_seed
from tests.simulation.scenario.drawing import draw_scenario
from tests.simulation.scenario.shape import FaultSet, Scenario
from tests.simulation.seed_pool import run_safely, run_seeds

pytestmark = pytest.mark.integration

ORDINARY_SEEDS = range(10)
ALL_SEEDS = range(1000)
CORPUS = Path(__file__).with_name("simulation_corpus.txt")


def failures(seeds: range, faults: FaultSet = "usual") -> dict[int, str]:
    """What went wrong, by seed."""
    reports = run_seeds(seeds, processes=2, faults=faults)
    return {report.seed: "; ".join(map(str, report.violations)) for report in reports if not report.passed}


def test_a_fleet_to_which_nothing_happens_completes_every_episode_at_the_first_attempt() -> None:
    report = run_seed(1, scenario=Scenario(seed=1))
    assert report.violations == ()
    assert set(report.outcomes) == {"completed", "truncated turns"}
    assert report.attempts == sum(report.outcomes.values())
    assert report.disturbances == {}


@pytest.mark.parametrize(("faults", "seed"), [("usual", 3), ("all", 3)])
def test_a_seed_gives_the_same_run_in_this_process_and_in_another(faults: FaultSet, seed: int) -> None:
    """The second: a recorder that is started again reads its archive, outside of the event loop."""
    first = run_seed(seed, faults=faults)
    run_seed(4)
    again = run_seed(seed, keep_lines=True, faults=faults)
    assert (again.trace_hash, again.outcomes, again.entries) == (first.trace_hash, first.outcomes, first.entries)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--faults", faults, "--json"],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(finished.stdout)["trace_hash"] == first.trace_hash


def test_different_seeds_give_different_runs() -> None:
    assert run_seed(5).trace_hash != run_seed(6).trace_hash


@pytest.mark.timeout(300)
def test_ten_seeds_keep_all_invariants() -> None:
    assert failures(ORDINARY_SEEDS) == {}


@pytest.mark.slow  # minutes: seeds that failed once are in the tests of every change
@pytest.mark.timeout(900)
def test_the_kept_seeds_reach_what_they_were_kept_for_and_keep_all_invariants() -> None:
    """Each reaches branches of the delivery contract that no other does: `benchmarks/simulation_coverage.py` chose them."""
    kept = msgspec.convert(list(map(str.split, CORPUS.read_text().splitlines())), type=list[tuple[FaultSet, int]], strict=False)
    reports = {(faults, seed): run_safely(seed, faults) for faults, seed in kept}
    assert {name: report.violations for name, report in reports.items() if not report.passed} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("faults", "seeds"), [("all", range(1, 1001)), ("swarm", range(1, 301))])
def test_many_seeds_with_all_faults_keep_all_invariants(faults: FaultSet, seeds: range) -> None:
    assert failures(seeds, faults) == {}


@pytest.mark.parametrize(
    "kind",
    [
        "claim_after_result",
        "logprobs_missing",
        "misfiled",
        "trained_twice",
        "lineage_unfounded",
        "floor_unsettled",
        "finished_unsettled",
        "below_floor_unsettled",
    ],
)
def test_an_audit_that_is_blind_to_something_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    add = Findings.add

    def look_away(self: Findings, found: str, identifier: str, sequence: int = 0) -> None:
        if found != kind:
            add(self, found, identifier, sequence)

    monkeypatch.setattr(Findings, "add", look_away)
    violations = run_seed(1).violations
    assert {violation.invariant for violation in violations} == {"the audit names what was forged"}
    assert {violation.detail.split(":")[0] for violation in violations} == {kind}


FAILED_ONCE: dict[tuple[FaultSet, int], str] = {
    ("usual", 736): "a learner that began at the last step finished before it had read the results of what was still open",
    ("usual", 903): "the same",
    ("all", 84): "a call that had waited behind a hanging one was refused where its session had left unawares",
    ("all", 117): "an observation ended ten workers, and a server that restarted counted its tries from 1: it was told as late",
    ("all", 148): "a takeover from a worker that had lost its lane was taken for one from a healthy worker",
    ("all", 200): "a session that was handed on in the midst of a reset ended as failed",
    ("all", 245): "rollouts and a learner filled one log together",
    ("all", 399): "a learner filled the log behind the one before it",
    ("all", 452): "an election failed the question whether an observation is still to be answered, and with it the episode",
    ("all", 771): "checkpoints were removed while no learner was there, and no disturbance was noted",
    ("all", 25): "one long pause that swallowed four deliveries was counted as one disturbance",
    ("all", 325): "rollouts closed an episode whose result had just left the log, and took that for its result",
    ("all", 1122): "a recorder that was behind raised the floor over what a new lineage was about to train again",
    ("all", 1262): "a learner that took over measured episodes by those that had only begun, and filled the log",
    ("all", 1308): "checkpoints were away between the newest one's entry and the removal of older ones",
    ("all", 1341): "the last group that a batch lacked was never asked for: it was measured by a log full of settled ones",
    ("all", 1404): "one open group kept all the content of settled ones behind it",
    ("learners", 57): "a learner that joined took late copies of settled requests for groups, and the other waited for it",
    ("learners", 52): "what another policy answered after an episode's end was held against the versions of the main one",
    ("swarm", 31): "a forged checkpoint covered fewer requests than the forged step before it left out",
    ("swarm", 71): "a gateway that was done ended the sessions of others that it hosted, and that was taken for no cause",
    ("swarm", 83): "an attempt that waited for an unanswered read was taken for one that does not stop",
    ("swarm", 101): "a gateway's client gave up at a 503, which is what it gets while the log does not answer",
    ("swarm", 128): "a recorder that was never told its lane began no archive, and none was expected to be missing",
    (
        "power",
        177,
    ): "a request that the log had lost was stored again behind its result, which the learner that joins never read",
    ("power", 179): "a lineage whose start the log kept for the versions alone was not taken for the one before",
    ("power", 331): "a learner lived on and settled a result that the log had lost, and the judge waited for it",
}
"""Seeds, and what they found."""


@pytest.mark.parametrize(("faults", "seed"), FAILED_ONCE)
def test_seeds_that_failed_once_hold(faults: FaultSet, seed: int) -> None:
    assert run_seed(seed, faults=faults).passed


def test_a_log_too_small_for_a_step_goes_on_once_an_operator_gives_it_room() -> None:
    scenario = msgspec.structs.replace(draw_scenario(245, "all"), log_bytes=220_000)
    report = run_seed(245, scenario=scenario, keep_lines=True)
    assert report.passed
    assert any("operator gives the log room" in line for line in report.lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_seeds_keep_all_invariants() -> None:
    assert failures(ALL_SEEDS) == {}


def test_the_command_tells_what_happened_and_writes_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.txt"
    assert simulate(["--seed", "1", "--trace", str(trace)]) == 0
    assert "seed 1: all invariants held" in capsys.readouterr().out
    assert "start learner-0" in trace.read_text()


def test_the_command_prints_the_failing_seeds_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.simulation.world.MOST_TIMES", 0)
    assert simulate(["--seeds", "0-1", "--processes", "1"]) == 1
    printed = capsys.readouterr().out
    assert "seed 0 FAILED" in printed
    assert "the training makes progress" in printed
    assert "failed: 0 1" in printed


@pytest.mark.parametrize("arguments", [[], ["--seed", "1", "--seeds", "1-2"], ["--seeds", "7"], ["--seeds", "9-3"]])
def test_the_command_refuses_what_it_cannot_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([*arguments]) == 2
    assert "--seeds" in capsys.readouterr().err


def test_seeds_that_no_message_can_carry_and_traces_that_cannot_be_written_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments in (
        ["--seed", str(1 << 64)],
        ["--seeds", f"0-{1 << 64}"],
        ["--seed", "1", "--trace", str(tmp_path / "nowhere" / "trace")],
    ):
        assert simulate(arguments) == 2
        assert arguments[-2] in capsys.readouterr().err
