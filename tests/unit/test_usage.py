"""`fleetbus usage`: tokens and calls by what became of their episodes, hours by worker, seconds by environment."""

from __future__ import annotations

import pytest

from fleetbus.log.stored_entries import decode_stored
from fleetbus.recording.usage import STOPPED_SECONDS, Usage, UsageFold
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import PROMPT, SAMPLED, LogBuilder, read_entries

SECOND = 1_000_000_000


def fold(log: LogBuilder, *, gap_before: int = 0, gap: float = 0.0) -> Usage:
    """One entry a second; ``gap`` further seconds before entry number ``gap_before``."""
    usage, now = UsageFold(), 0
    for entry in read_entries(log):
        now += SECOND + (int(gap * SECOND) if entry.sequence == gap_before else 0)
        message = decode_stored(entry)
        assert message is not None
        usage.apply(message, entry.sequence, now)
    return usage.build()


def test_every_sampled_token_is_counted_under_one_use() -> None:
    log = LogBuilder()
    log.lineage()
    log.play("trained", turns=2, tool_calls=3)
    log.play("left-out")
    log.play("held-out", split="eval")
    log.request("open")
    log.claim("open")
    log.act("open", 0)
    log.request("taken-over")
    log.claim("taken-over")
    log.act("taken-over", 0, sampled=pack_ids(range(7)))
    log.claim("taken-over", attempt=2)
    log.finish("taken-over", [log.act("taken-over", 0, attempt=2)], attempt=2)
    log.step(1, ["trained", "taken-over"], {"left-out": "stale"})

    usage = fold(log)

    assert {use: (each.episodes, each.calls, each.sampled) for use, each in usage.by_use.items()} == {
        "trained": (2, 3, 3 * SAMPLED),
        "excluded: stale": (1, 2, 2 * SAMPLED),
        "evaluation": (1, 2, 2 * SAMPLED),
        "not settled": (1, 1, SAMPLED),
        "attempts that were superseded": (0, 1, 7),
    }
    assert usage.by_use["trained"].prompt == 3 * PROMPT and usage.by_use["trained"].tool_calls == 3
    assert usage.steps == 1


def test_what_is_sampled_after_the_result_is_counted_too() -> None:
    log = LogBuilder()
    log.lineage()
    log.play("a", turns=1)
    log.act("a", 1)
    log.act("its-request-is-trimmed", 0)

    usage = fold(log)

    assert {use: (each.episodes, each.calls) for use, each in usage.by_use.items()} == {
        "not settled": (1, 2),
        "attempts that were superseded": (0, 1),
    }


def test_a_step_that_was_cut_off_trained_nothing() -> None:
    log = LogBuilder()
    log.lineage("l1")
    log.play("a")
    log.step(1, ["a"])
    log.lineage("l2", parent="l1", parent_step=0)

    usage = fold(log)

    assert usage.steps == 0 and list(usage.by_use) == ["not settled"]


def test_a_worker_s_hours_leave_out_the_time_in_which_it_was_stopped() -> None:
    log = LogBuilder()
    log.play("a")
    half = len(log.entries)
    log.play("b")

    running, stopped = fold(log), fold(log, gap_before=half + 1, gap=2 * STOPPED_SECONDS)

    (hours,) = [each.hours for each in running.workers if each.role == "environment"]
    (without,) = [each.hours for each in stopped.workers if each.role == "environment"]
    assert hours * 3600 == pytest.approx(2 * half - 2) and without < hours
    assert stopped.hours * 3600 == pytest.approx(2 * half - 1 + 2 * STOPPED_SECONDS)


def test_a_finished_episode_has_mean_seconds_by_environment_and_stage() -> None:
    log = LogBuilder()
    log.play("a", env="slow", timings={"step": 3.0, "verify": 1.0})
    log.play("b", env="slow", timings={"step": 5.0, "verify": float("nan")})
    log.play("c", env="fast", timings={"step": 0.5})

    fast, slow = fold(log).environments

    assert (fast.env, fast.seconds) == ("fast", 0.5)
    assert (slow.env, slow.episodes, slow.seconds, slow.stages) == ("slow", 2, 4.5, {"step": 4.0, "verify": 0.5})


@pytest.mark.parametrize("given", ["gpu=1", "learner", "learner=many", "learner=-1", "=1"])
def test_gpus_that_are_not_of_a_role_are_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["usage", "tests/replay/recordings/guessing.fbrec", "--gpus", given]) == 2
    assert f"--gpus {given}: write ROLE=N" in capsys.readouterr().err


def test_the_command_reads_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_program(["usage", "tests/replay/recordings/guessing.fbrec", "--gpus", "learner=2", "--gpus", "inference=0.5"]) == 0
    )
    shown = capsys.readouterr().out
    assert "sampled tokens" in shown and "GPU hours (learner 2, inference 0.5 a worker)" in shown
