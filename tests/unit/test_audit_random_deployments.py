"""Random fleets that keep the rules: whatever they do, every audit balances."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.audit.run import enter
from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit.books import Audit
from fleetbus_schemas import FloorRaised, Split
from tests.support.log_builder import SUBJECTS, fold_audit, start_log


class Fleet:
    """Random workers that keep the rules: they die, hand back, resume or restart, come late; learners replace each other."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.log_builder = start_log()
        self.versions = 1
        self.graded: dict[str, bool] = {}
        self.trained: set[str] = set()
        self.settled: set[str] = set()
        self.lineages = 1
        self.checkpoints: list[tuple[int, frozenset[str], frozenset[str]]] = [(0, frozenset(), frozenset())]

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def play(self, episode: str, split: Split) -> Iterator[None]:
        """One entry per iteration."""
        log_builder, turns = self.log_builder, self.dice.randint(1, 4)
        log_builder.request(episode, split=split)
        history: list[int] = []
        for attempt in (1, 2, 3):
            yield
            del history[len(history) if self.chance(0.5) else 0 :]
            log_builder.claim(episode, attempt, resumed=len(history))
            yield
            for turn in range(len(history), turns):
                log_builder.observe(episode, turn, attempt)
                yield
                if self.chance(0.1):
                    break
                history.append(log_builder.act(episode, turn, attempt, version=self.dice.randrange(self.versions)))
                yield
            else:
                log_builder.finish(episode, history, attempt, split=split)
                self.graded |= {episode: True} if split == "train" else {}
                return
            if self.chance(0.3):
                log_builder.release(episode, attempt)
        log_builder.finish(episode, [], 3, split=split, outcome="lost", reward=None)
        self.graded |= {episode: False} if split == "train" else {}

    def train(self) -> None:
        ready = sorted(self.graded.keys() - self.settled)
        step = self.checkpoints[-1][0] + 1
        trained = [episode for episode in ready if self.graded[episode] and self.chance(0.7)]
        excluded = {episode: "stale" if self.graded[episode] else "lost" for episode in ready if episode not in trained}
        self.log_builder.step(step, trained, excluded, lineage=f"l{self.lineages}")
        self.log_builder.version(self.versions)
        self.log_builder.checkpoint(step, lineage=f"l{self.lineages}")
        self.versions += 1
        self.trained |= set(trained)
        self.settled |= set(ready)
        self.checkpoints.append((step, frozenset(self.trained), frozenset(self.settled)))

    def replace_learner(self) -> None:
        del self.checkpoints[self.dice.randrange(len(self.checkpoints)) + 1 :]
        step, trained, settled = self.checkpoints[-1]
        self.log_builder.lineage(f"l{self.lineages + 1}", parent=f"l{self.lineages}", parent_step=step, restart=f"{step}/1")
        self.lineages += 1
        self.trained, self.settled = set(trained), set(settled)


def run_fleet(dice: random.Random, count: int) -> Fleet:
    fleet = Fleet(dice)
    plays = [fleet.play(f"e{number}", "eval" if fleet.chance(0.2) else "train") for number in range(count)]
    while plays:
        play = dice.choice(plays)
        if next(play, plays) is plays or fleet.chance(0.01):
            plays.remove(play)
        if fleet.chance(0.05):
            fleet.train()
        if fleet.chance(0.02):
            fleet.replace_learner()
    return fleet


@pytest.mark.integration
@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_whatever_a_fleet_that_keeps_the_rules_does_the_books_balance(dice: random.Random, count: int) -> None:
    fleet = run_fleet(dice, count)
    report = fold_audit(fleet.log_builder).report()
    assert report.findings == ()
    assert report.books.trained == len(fleet.trained)
    assert report.books.requested == report.books.accounted
    assert sum(report.books.excluded.values()) == len(fleet.settled) - len(fleet.trained)


@pytest.mark.integration
@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 8), st.booleans())
def test_an_audit_that_was_kept_and_continued_anywhere_reports_the_same(
    dice: random.Random, count: int, is_damaged: bool
) -> None:
    log_builder = run_fleet(dice, count).log_builder
    log_builder.add(SUBJECTS.floor, FloorRaised(sequence=len(log_builder.entries) // 2))
    log_builder.play("after")
    if is_damaged:
        del log_builder.entries[dice.randrange(len(log_builder.entries))]
    audit = Audit()
    for sequence, (subject, payload) in enumerate(log_builder.entries, start=1):
        if dice.random() < 0.1:
            audit = Audit.decode(audit.encode())
        enter(audit, StreamEntry(subject=subject, payload=payload, sequence=sequence, time_ns=0))
    assert audit.report() == fold_audit(log_builder).report()
