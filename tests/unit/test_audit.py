"""The audit against logs that are written by hand: what is valid balances, and what is not judged is said."""

from __future__ import annotations

import pytest

from fleetbus.audit import audit_run
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from tests.support.story import SUBJECTS, audited, begun, folded


async def test_a_valid_log_balances_and_every_request_is_in_one_place() -> None:
    story = begun()
    for episode in "abcd":
        story.play(episode)
    story.play("eval", split="eval")
    story.play("lost", outcome="lost", reward=None)
    story.step(1, ["a", "b"], {"c": "stale", "lost": "lost"})
    story.request("waits")
    story.request("runs")
    story.claim("runs")
    report = await audited(story)
    assert report.findings == ()
    books = report.books
    assert (books.requested, books.trained, books.excluded) == (8, 2, {"lost": 1, "stale": 1})
    assert (books.evaluation, books.waiting, books.running, books.finished) == (1, 1, 1, 1)
    assert report.attempts.started == 7
    assert (report.attempts.finished, report.attempts.in_flight) == (6, 1)


async def test_the_history_of_a_taken_over_episode_may_span_attempts() -> None:
    story = begun()
    story.request("a")
    story.claim("a", 1)
    story.observe("a", 0)
    first = story.act("a", 0)
    story.observe("a", 1)
    story.claim("a", 2, resumed=1)
    story.act("a", 1)  # late, by the attempt that was superseded
    story.observe("a", 1, attempt=2)
    second = story.act("a", 1, attempt=2)
    story.finish("a", [first, second], attempt=2)
    story.step(1, ["a"])
    report = await audited(story)
    assert report.findings == ()
    assert (report.attempts.superseded, report.attempts.finished) == (1, 1)


async def test_what_a_cut_lineage_trained_is_void_and_may_be_trained_again() -> None:
    story = begun()
    for episode in "abc":
        story.play(episode)
    story.step(1, ["a"])
    story.step(2, ["b"], {"c": "stale"})
    story.lineage("l2", parent="l1", parent_step=1)
    story.step(2, ["b", "c"], lineage="l2")
    report = await audited(story)
    assert report.findings == ()
    assert (report.books.trained, report.books.void) == (3, 1)


async def test_what_the_end_of_training_excluded_is_open_again_for_a_lineage_that_goes_on() -> None:
    story = begun()
    for episode in "ab":
        story.play(episode)
    story.step(1, ["a"])
    story.end(1, {"b": "training_finished"})
    assert (await audited(story)).books.excluded == {"training_finished": 1}
    story.lineage("l2", parent="l1", parent_step=1)
    story.step(2, ["b"], lineage="l2")
    report = await audited(story)
    assert report.findings == ()
    assert (report.books.trained, report.books.excluded) == (2, {})


async def test_an_entry_that_is_no_message_changes_nothing_and_is_counted() -> None:
    story = begun()
    story.play("a")
    story.entries.append((SUBJECTS.episode("a"), b"\xff"))
    report = await audited(story)
    assert (report.findings, report.malformed, report.entries) == ((), 1, len(story.entries))


async def test_a_trimmed_log_is_not_judged_without_its_archive() -> None:
    story = begun()
    story.play("a")
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in story.entries:
            await bus.publish(subject, payload)
        await bus.purge(SUBJECTS.actions(), below=1 << 40)
        with pytest.raises(UserError, match="2 entries of the log of run run were trimmed: give --archive"):
            await audit_run(bus, SUBJECTS)


def test_an_audit_keeps_nothing_per_message_once_an_episode_has_its_result() -> None:
    story = begun()
    story.play("a", turns=40)
    audit = folded(story)
    (episode,) = audit._episodes.values()
    assert (episode.claims, episode.turns, episode.tokens) == ([], [], {})
    assert episode.observed == {1: (1 << 40) - 1}
