"""The audit against logs that are written by hand: what is valid balances, and what is not judged is said."""

from __future__ import annotations

import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.audit.findings import SessionBooks
from fleetbus.errors import UserError
from fleetbus_schemas import SessionAnswer, SessionCall, SessionClaimed, SessionEnded, SessionRecorded, Task, UntrainedTurn
from tests.support.log_builder import SUBJECTS, LogBuilder, audit_log, fold_audit, kinds, start_log


async def test_a_valid_log_balances_and_every_request_is_in_one_place() -> None:
    log_builder = start_log()
    for episode in "abcd":
        log_builder.play(episode)
    log_builder.play("eval", split="eval")
    log_builder.play("lost", outcome="lost", reward=None)
    log_builder.step(1, ["a", "b"], {"c": "stale", "lost": "lost"})
    log_builder.request("waits")
    log_builder.request("runs")
    log_builder.claim("runs")
    report = await audit_log(log_builder)
    assert report.findings == ()
    books = report.books
    assert (books.requested, books.trained, books.excluded) == (8, 2, {"lost": 1, "stale": 1})
    assert (books.evaluation, books.waiting, books.running, books.finished) == (1, 1, 1, 1)
    assert report.attempts.started == 7
    assert (report.attempts.finished, report.attempts.in_flight) == (6, 1)


async def test_the_history_of_a_taken_over_episode_may_span_attempts() -> None:
    log_builder = start_log()
    log_builder.request("a")
    log_builder.claim("a", 1)
    log_builder.observe("a", 0)
    first = log_builder.act("a", 0)
    log_builder.observe("a", 1)
    log_builder.claim("a", 2, resumed=1)
    log_builder.act("a", 1)  # late, by the attempt that was superseded
    log_builder.observe("a", 1, attempt=2)
    second = log_builder.act("a", 1, attempt=2)
    log_builder.finish("a", [first, second], attempt=2)
    log_builder.step(1, ["a"])
    report = await audit_log(log_builder)
    assert report.findings == ()
    assert (report.attempts.superseded, report.attempts.finished) == (1, 1)


async def test_what_a_cut_lineage_trained_is_void_and_may_be_trained_again() -> None:
    log_builder = start_log()
    for episode in "abc":
        log_builder.play(episode)
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1)
    log_builder.step(2, ["b"], {"c": "stale"})
    log_builder.lineage("l2", parent="l1", parent_step=1)
    log_builder.step(2, ["b", "c"], lineage="l2")
    report = await audit_log(log_builder)
    assert report.findings == ()
    assert (report.books.trained, report.books.void) == (3, 1)


async def test_what_the_end_of_training_excluded_is_open_again_for_a_lineage_that_goes_on() -> None:
    log_builder = start_log()
    for episode in "ab":
        log_builder.play(episode)
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1)
    log_builder.end(1, {"b": "training_finished"})
    assert (await audit_log(log_builder)).books.excluded == {"training_finished": 1}
    log_builder.lineage("l2", parent="l1", parent_step=1)
    log_builder.step(2, ["b"], lineage="l2")
    report = await audit_log(log_builder)
    assert report.findings == ()
    assert (report.books.trained, report.books.excluded) == (2, {})


async def test_an_entry_that_is_no_message_changes_nothing_and_is_counted() -> None:
    log_builder = start_log()
    log_builder.play("a")
    log_builder.entries.append((SUBJECTS.episode("a"), b"\xff"))
    report = await audit_log(log_builder)
    assert (report.findings, report.malformed, report.entries) == ((), 1, len(log_builder.entries))


async def test_sessions_that_callers_drive_are_counted_with_their_steps_and_ends() -> None:
    log_builder = start_log()
    for name, end in (("closed", "closed"), ("failed", "env_failed"), ("open", None)):
        for attempt in (1, 2):
            claim = SessionClaimed(session=name, attempt=attempt, worker="w", nonce="n", task=Task(key="t"))
            log_builder.add(SUBJECTS.session(name), claim)
        for number in range(3):
            call = SessionCall(session=name, call="step", key=f"{number}")
            is_failure = end == "env_failed" and number == 2
            answer = SessionAnswer(session=name, key=call.key, number=number, end="env_failed" if is_failure else None)
            log_builder.add(SUBJECTS.session(name), SessionRecorded(session=name, call=call, answer=answer))
    log_builder.add(SUBJECTS.session("closed"), SessionEnded(session="closed", end="closed"))
    report = await audit_log(log_builder)
    assert report.sessions == SessionBooks(opened=3, open=1, steps=8, ended={"closed": 1, "env_failed": 1})
    assert report.balanced and report.books.requested == 0


async def test_turns_that_results_leave_out_are_counted_by_their_reasons() -> None:
    log_builder = start_log()
    left_out = (UntrainedTurn(turn=0, reason="side_call"), UntrainedTurn(turn=1, reason="not_delivered"))
    log_builder.play("a", untrained=left_out)
    log_builder.play("b", untrained=left_out[:1])
    log_builder.play("c", untrained=(UntrainedTurn(turn=0, reason="seat"),))
    report = await audit_log(log_builder)
    assert (report.side_calls, report.undelivered, report.unrewarded) == (2, 1, 1)


async def test_a_trimmed_log_is_not_judged_without_its_archive() -> None:
    log_builder = start_log()
    log_builder.play("a")
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in log_builder.entries:
            await bus.publish(subject, payload)
        await bus.purge(SUBJECTS.actions(), below=1 << 40)
        with pytest.raises(UserError, match="2 entries of the log of run run were trimmed: give --archive"):
            await audit_run(bus, SUBJECTS)


async def test_nothing_is_no_log_that_balances() -> None:
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        assert [finding.kind for finding in (await audit_run(bus, SUBJECTS)).findings] == ["nothing_read"]


async def test_a_log_is_held_against_the_last_sequence_that_its_server_says() -> None:
    log_builder = start_log()
    log_builder.play("a")
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in [*log_builder.entries, (SUBJECTS.life("learner", "l"), b"")]:
            await bus.publish(subject, payload)
        end = (await bus.log_state()).last_sequence
        await bus.purge(SUBJECTS.life("*", "*"), below=1 << 40)
        assert kinds(await audit_run(bus, SUBJECTS)) == {"entries_missing": (f"{end}-{end}",)}
        await bus.purge(SUBJECTS.log, below=1 << 40)
        assert kinds(await audit_run(bus, SUBJECTS)) == {"entries_missing": (f"1-{end}",), "nothing_read": ("entries 0",)}


async def test_reasons_that_results_and_versions_prove_are_no_finding_and_what_nothing_proves_is_said() -> None:
    settings = {"learner": {"max_staleness": 1, "min_group_size": 2}, "group_judge": {"weight": 0.5}}
    log_builder = LogBuilder()
    log_builder.lineage(settings=settings)
    log_builder.version()
    log_builder.play("old", policy_versions=(0,))
    log_builder.play("failed", outcome="timeout", reward=None)
    for episode in ("lonely", "judged", "unscored"):
        log_builder.play(episode)
    log_builder.step(1, ["judged"], {"failed": "timeout", "lonely": "group_too_small", "unscored": "judge_failed"},
                     rewards={"judged": 1.4}, scores={"judged": 0.8})  # fmt: skip
    log_builder.step(2, [])
    log_builder.step(3, [], {"old": "stale"})
    report = await audit_log(log_builder)
    assert report.findings == ()
    assert report.unproven == ("1 exclusions are for reasons that the learner alone knows",)


async def test_how_old_a_version_is_proves_nothing_once_a_later_lineage_went_back_behind_it_and_its_own_versions_do() -> None:
    """Found by the simulation, three lineages on: the learner counts a void version by what its checkpoint knows."""
    settings = {"learner": {"max_staleness": 1}}
    log_builder = start_log()
    log_builder.step(1, [])
    log_builder.step(2, [])
    log_builder.version(2)
    log_builder.lineage("l2", parent="l1", settings=settings)
    log_builder.lineage("l3", parent="l2", settings=settings)
    for step in (1, 2, 3):
        log_builder.step(step, [], lineage="l3")
    log_builder.version(3)
    log_builder.play("void", policy_versions=(2,))
    log_builder.play("fresh", policy_versions=(3,))
    log_builder.step(4, [], {"void": "stale"}, lineage="l3")
    log_builder.step(5, [], {"fresh": "stale"}, lineage="l3")
    report = await audit_log(log_builder)
    assert kinds(report) == {"exclusion_unfounded": ("fresh",)}


def test_an_audit_keeps_nothing_per_message_once_an_episode_has_its_result() -> None:
    log_builder = start_log()
    log_builder.play("a", turns=40)
    audit = fold_audit(log_builder)
    (episode,) = audit._episodes.values()
    assert (episode.claims, episode.turns, episode.hashes, episode.actions) == ([], [], {}, {})
    assert episode.observed == {(1, 0): (1 << 32) - 1, (1, 1): (1 << 8) - 1}
