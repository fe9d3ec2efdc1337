"""The audit against logs that are written by hand: a valid one balances, and every forged imbalance is named with its ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.audit import audit_run, enter
from fleetbus.bus.base import Stored
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.audit import Audit
from fleetbus.core.audit_findings import KINDS, Report
from fleetbus.errors import UserError
from schemas import (
    Action,
    ActionReference,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
    Split,
    StepTrained,
    Subjects,
    Task,
    TrainingFinished,
    VersionSpan,
    encode,
)
from schemas.tokens import extend_history, pack_ids, pack_logprobs, pack_mask

SUBJECTS = Subjects("run")
PROMPT, SAMPLED = 3, 2


class Story:
    """A log in the making; every method appends one entry and returns its sequence."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes]] = []
        self.history = b""

    def add(self, subject: str, message: Message) -> int:
        self.entries.append((subject, encode(message)))
        return len(self.entries)

    def lineage(self, name: str = "l1", parent: str = "", parent_step: int = 0) -> int:
        started = LineageStarted(lineage=name, worker="learner", parent=parent, parent_step=parent_step)
        self.add(SUBJECTS.train("default"), started)
        return self.add(SUBJECTS.policy("default"), started)

    def version(self, number: int = 0) -> int:
        published = PolicyPublished(
            policy="default", version=number, lineage="l1", step=number, uri="", manifest=(), size_bytes=0
        )
        return self.add(SUBJECTS.policy("default"), published)

    def request(self, episode: str, *, split: Split = "train", pool: str = "default") -> int:
        request = EpisodeRequested(
            episode_id=episode, group_id="g", sample_index=0, split=split, task=Task(key="t"), policy="default", deadline_ns=1
        )
        return self.add(SUBJECTS.task(pool, episode), request)

    def claim(self, episode: str, attempt: int = 1, *, resumed: int = 0) -> int:
        claim = AttemptStarted(
            episode_id=episode, attempt=attempt, worker="w", nonce=f"{episode}{attempt}", lane="e0", resumed_at_turn=resumed
        )
        return self.add(SUBJECTS.episode(episode), claim)

    def release(self, episode: str, attempt: int = 1) -> int:
        return self.add(SUBJECTS.episode(episode), AttemptReleased(episode_id=episode, attempt=attempt, worker="w"))

    def observe(self, episode: str, turn: int, attempt: int = 1) -> int:
        observation = Observation(
            episode_id=episode, attempt=attempt, turn=turn, policy="default", messages=(), tokens_left=9,
            environment_lane="e0", deadline_ns=1,
        )  # fmt: skip
        return self.add(SUBJECTS.observation("default", "any", episode), observation)

    def act(self, episode: str, turn: int, attempt: int = 1, *, version: int = 0) -> int:
        delta, sampled = pack_ids(range(PROMPT)), pack_ids(range(SAMPLED))
        action = Action(
            episode_id=episode, attempt=attempt, turn=turn, text="x", prompt_delta=delta, sampled=sampled,
            logprobs=pack_logprobs([-1.0] * SAMPLED), versions=(VersionSpan(version=version, start=0, stop=SAMPLED),),
            history_hash=extend_history(b"", delta, sampled),
        )  # fmt: skip
        return self.add(SUBJECTS.action("e0", episode), action)

    def finish(self, episode: str, actions: list[int], attempt: int = 1, **changes: Any) -> int:
        mask = ([False] * PROMPT + [True] * SAMPLED) * len(actions)
        result = EpisodeFinished(
            episode_id=episode, group_id="g", attempt=attempt, outcome="completed", worker="w", reward=1.0, turns=len(actions),
            actions=tuple(ActionReference(sequence=sequence, lane="e0", turn=turn) for turn, sequence in enumerate(actions)),
            tokens=len(mask), loss_mask=pack_mask(mask),
        )  # fmt: skip
        return self.add(SUBJECTS.episode(episode), msgspec.structs.replace(result, **changes))

    def play(self, episode: str, turns: int = 2, *, request: bool = True, split: Split = "train", **changes: Any) -> int:
        """A whole episode."""
        if request:
            self.request(episode, split=split)
        self.claim(episode)
        actions = []
        for turn in range(turns):
            self.observe(episode, turn)
            actions.append(self.act(episode, turn))
        return self.finish(episode, actions, split=split, **changes)

    def step(self, number: int, episodes: list[str], excluded: dict[str, str] | None = None, lineage: str = "l1") -> int:
        reasons = tuple(Exclusion(episode_id=episode, reason=reason) for episode, reason in (excluded or {}).items())
        trained = StepTrained(lineage=lineage, step=number, version=number, episodes=tuple(episodes), excluded=reasons)
        return self.add(SUBJECTS.train("default"), trained)

    def end(self, step: int, excluded: dict[str, str], lineage: str = "l1") -> int:
        reasons = tuple(Exclusion(episode_id=episode, reason=reason) for episode, reason in excluded.items())
        finished = TrainingFinished(lineage=lineage, step=step, version=step, excluded=reasons)
        return self.add(SUBJECTS.train("default"), finished)


def begun() -> Story:
    story = Story()
    story.lineage()
    story.version()
    return story


async def audited(story: Story) -> Report:
    """The audit of the story as the log of a bus."""
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in story.entries:
            await bus.publish(subject, payload)
        return await audit_run(bus, SUBJECTS)


def folded(story: Story) -> Audit:
    audit = Audit()
    for sequence, (subject, payload) in enumerate(story.entries, start=1):
        enter(audit, Stored(subject=subject, payload=payload, sequence=sequence, time_ns=0))
    return audit


def kinds(report: Report) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.ids for finding in report.findings}


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


def trained_twice(story: Story) -> None:
    story.play("a")
    story.step(1, ["a"])
    story.step(2, ["a"])


def trained_and_excluded(story: Story) -> None:
    story.play("a")
    story.step(1, ["a"])
    story.step(2, [], {"a": "stale"})


def excluded_twice(story: Story) -> None:
    story.play("a")
    story.step(1, [], {"a": "stale"})
    story.end(1, {"a": "training_finished"})


def excluded_without_reason(story: Story) -> None:
    story.play("a")
    story.step(1, [], {"a": ""})


def trained_without_result(story: Story) -> None:
    story.request("a")
    story.step(1, ["a"])


def trained_ungraded(story: Story) -> None:
    story.play("a", outcome="env_failed", reward=None)
    story.step(1, ["a"])


def evaluation_settled(story: Story) -> None:
    story.play("a", split="eval")
    story.step(1, ["a"])


def settled_never_requested(story: Story) -> None:
    story.step(1, [], {"a": "stale"})


def played_never_requested(story: Story) -> None:
    story.play("a", request=False)


def requested_twice(story: Story) -> None:
    story.request("a")
    story.request("a", pool="other")


def second_result(story: Story) -> None:
    story.play("a")
    story.finish("a", [])


def claim_after_result(story: Story) -> None:
    story.play("a")
    story.claim("a", 2)


def claim_out_of_order(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.claim("a", 3)


def release_not_newest(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.claim("a", 2)
    story.release("a", 1)


def result_not_newest(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.observe("a", 0)
    action = story.act("a", 0)
    story.claim("a", 2, resumed=1)
    story.finish("a", [action], attempt=1)


def observed_unclaimed(story: Story) -> None:
    story.request("a")
    story.observe("a", 0)


def action_unobserved(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 1)


def late_action_unobserved(story: Story) -> None:
    story.play("a", turns=1)
    story.act("a", 1)


def action_repeated(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0)
    story.act("a", 0)


def version_unpublished(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0, version=1)
    story.version(1)


def version_repeated(story: Story) -> None:
    story.version(0)


def action_missing(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0)
    story.finish("a", [2])


def actions_of_a_superseded_attempt(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.observe("a", 0)
    action = story.act("a", 0)
    story.claim("a", 2, resumed=0)
    story.finish("a", [action], attempt=2)


def loss_mask_length(story: Story) -> None:
    story.play("a", tokens=9)


def loss_mask_bytes(story: Story) -> None:
    story.play("a", loss_mask=b"\x18")


def loss_mask_unsampled(story: Story) -> None:
    story.play("a", turns=1, loss_mask=b"\x1c")


def reward_missing(story: Story) -> None:
    story.play("a", reward=None)


def reward_of_a_failure(story: Story) -> None:
    story.play("a", outcome="env_failed", reward=0.0)


def lineage_replaced(story: Story) -> None:
    story.play("a")
    story.lineage("l2", parent="l1")
    story.step(1, ["a"], lineage="l1")


def step_out_of_order(story: Story) -> None:
    story.play("a")
    story.step(2, ["a"])


def misfiled(story: Story) -> None:
    story.add(SUBJECTS.episode("a"), AttemptReleased(episode_id="b", attempt=1, worker="w"))


FORGERIES: list[tuple[Callable[[Story], None], str, str]] = [
    (trained_twice, "trained_twice", "a"),
    (trained_and_excluded, "trained_and_excluded", "a"),
    (excluded_twice, "excluded_twice", "a"),
    (excluded_without_reason, "excluded_without_reason", "a"),
    (trained_without_result, "trained_without_result", "a"),
    (trained_ungraded, "trained_without_result", "a"),
    (evaluation_settled, "evaluation_settled", "a"),
    (settled_never_requested, "never_requested", "a"),
    (played_never_requested, "never_requested", "a"),
    (requested_twice, "requested_twice", "a"),
    (second_result, "second_result", "a"),
    (claim_after_result, "claim_after_result", "a"),
    (claim_out_of_order, "claim_out_of_order", "a"),
    (release_not_newest, "release_not_newest", "a"),
    (result_not_newest, "result_not_newest", "a"),
    (observed_unclaimed, "observed_unclaimed", "a"),
    (action_unobserved, "action_unobserved", "a"),
    (late_action_unobserved, "action_unobserved", "a"),
    (action_repeated, "action_repeated", "a"),
    (version_unpublished, "version_unpublished", "a"),
    (version_repeated, "version_repeated", "default/0"),
    (action_missing, "action_missing", "a"),
    (actions_of_a_superseded_attempt, "actions_not_history", "a"),
    (loss_mask_length, "loss_mask_length", "a"),
    (loss_mask_bytes, "loss_mask_length", "a"),
    (loss_mask_unsampled, "loss_mask_unsampled", "a"),
    (reward_missing, "reward_not_of_outcome", "a"),
    (reward_of_a_failure, "reward_not_of_outcome", "a"),
    (lineage_replaced, "lineage_replaced", "l1/1"),
    (step_out_of_order, "step_out_of_order", "l1/2"),
    (misfiled, "misfiled", "a"),
]


@pytest.mark.parametrize(("forge", "kind", "offender"), FORGERIES, ids=[forge.__name__ for forge, _, _ in FORGERIES])
async def test_a_forged_imbalance_is_named_with_its_id(forge: Callable[[Story], None], kind: str, offender: str) -> None:
    story = begun()
    story.play("innocent")
    forge(story)
    report = await audited(story)
    assert kinds(report).get(kind) == (offender,)
    assert not report.balanced
    assert all("innocent" not in ids for ids in kinds(report).values())


def test_every_kind_of_imbalance_is_forged() -> None:
    needs_a_hole = {"entries_missing"}
    follows_from_another = {"books_open"}
    assert {kind for _, kind, _ in FORGERIES} | needs_a_hole | follows_from_another == set(KINDS)


async def test_books_that_do_not_add_up_are_a_finding_of_their_own() -> None:
    story = begun()
    trained_twice(story)
    report = await audited(story)
    assert kinds(report)["books_open"] == ("1 requested, 2 accounted for",)


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


class Fleet:
    """Random workers that keep the rules: they die, hand back, resume or restart, come late; learners replace each other."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.story = begun()
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
        story, turns = self.story, self.dice.randint(1, 4)
        story.request(episode, split=split)
        history: list[int] = []
        for attempt in (1, 2, 3):
            yield
            del history[len(history) if self.chance(0.5) else 0 :]
            story.claim(episode, attempt, resumed=len(history))
            yield
            for turn in range(len(history), turns):
                story.observe(episode, turn, attempt)
                yield
                if self.chance(0.1):
                    break
                history.append(story.act(episode, turn, attempt, version=self.dice.randrange(self.versions)))
                yield
            else:
                story.finish(episode, history, attempt, split=split)
                self.graded |= {episode: True} if split == "train" else {}
                return
            if self.chance(0.3):
                story.release(episode, attempt)
        story.finish(episode, [], 3, split=split, outcome="lost", reward=None)
        self.graded |= {episode: False} if split == "train" else {}

    def train(self) -> None:
        ready = sorted(self.graded.keys() - self.settled)
        step = self.checkpoints[-1][0] + 1
        trained = [episode for episode in ready if self.graded[episode] and self.chance(0.7)]
        excluded = {episode: "stale" if self.graded[episode] else "lost" for episode in ready if episode not in trained}
        self.story.step(step, trained, excluded, lineage=f"l{self.lineages}")
        self.story.version(self.versions)
        self.versions += 1
        self.trained |= set(trained)
        self.settled |= set(ready)
        self.checkpoints.append((step, frozenset(self.trained), frozenset(self.settled)))

    def replace_learner(self) -> None:
        del self.checkpoints[self.dice.randrange(len(self.checkpoints)) + 1 :]
        step, trained, settled = self.checkpoints[-1]
        self.story.lineage(f"l{self.lineages + 1}", parent=f"l{self.lineages}", parent_step=step)
        self.lineages += 1
        self.trained, self.settled = set(trained), set(settled)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_whatever_a_fleet_that_keeps_the_rules_does_the_books_balance(dice: random.Random, count: int) -> None:
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
    report = folded(fleet.story).report()
    assert report.findings == ()
    assert report.books.trained == len(fleet.trained)
    assert report.books.requested == report.books.accounted
    assert sum(report.books.excluded.values()) == len(fleet.settled) - len(fleet.trained)
