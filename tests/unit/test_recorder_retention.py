"""Content of the log that is still needed: of episodes that no checkpoint of the surviving lineage covers."""

from __future__ import annotations

from fleetbus.core.training.retention import Retention
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    LineageStarted,
    Message,
    Split,
    StepTrained,
    Subjects,
    Task,
    TrainingFinished,
)

S = Subjects("run")


class Log:
    def __init__(self) -> None:
        self.retention = Retention()
        self.last = 0
        self.train(LineageStarted(lineage="l1", worker="w"))

    def enter(self, subject: str, message: Message | None = None) -> int:
        self.last += 1
        self.retention.enter(self.last, subject, message)
        return self.last

    def train(self, message: Message) -> None:
        self.enter(S.train("default"), message)

    def play(self, episode: str, split: Split = "train", lineage: str = "l1") -> int:
        """A whole episode; returns the position of its first observation."""
        request = EpisodeRequested(
            episode_id=episode, group_id="g", sample_index=0, split=split, task=Task(key="t"), policy="p", deadline_ns=1,
            lineage=lineage,
        )  # fmt: skip
        self.enter(S.task("default", episode), request)
        first = self.enter(S.observation("p", "any", episode))
        self.enter(S.action("e0", episode))
        result = EpisodeFinished(episode_id=episode, group_id="g", attempt=1, outcome="completed", worker="w", split=split)
        self.enter(S.episode(episode), result)
        return first

    def step(self, number: int, *episodes: str, excluded: str = "", lineage: str = "l1") -> None:
        reasons = (Exclusion(episode_id=excluded, reason="stale"),) if excluded else ()
        self.train(StepTrained(lineage=lineage, step=number, version=number, episodes=episodes, excluded=reasons))

    def checkpoint(self, step: int, lineage: str = "l1") -> None:
        self.train(CheckpointStored(lineage=lineage, step=step, version=step, file="f", floor=1))

    @property
    def limit(self) -> int:
        return self.retention.limit(self.last)


def test_nothing_is_trimmed_before_a_checkpoint_covers_the_step() -> None:
    log = Log()
    first = log.play("a")
    log.step(1, "a")
    assert log.limit == first - 1
    log.checkpoint(1)
    assert log.limit == log.last
    assert log.retention.is_settled(S.action("e0", "a"))


def test_a_checkpoint_covers_no_later_step() -> None:
    log = Log()
    log.play("a")
    second = log.play("b")
    log.step(1, "a")
    log.step(2, "b")
    log.checkpoint(1)
    assert log.limit == second - 1
    assert not log.retention.is_settled(S.action("e0", "b"))


def test_excluded_episodes_are_settled_like_trained_ones() -> None:
    log = Log()
    log.play("a")
    log.step(1, excluded="a")
    log.checkpoint(1)
    assert log.limit == log.last


def test_an_evaluation_episode_is_settled_by_its_result() -> None:
    log = Log()
    log.play("a", split="eval")
    assert log.limit == log.last


def test_an_episode_that_no_learner_asked_for_is_settled_by_its_result() -> None:
    """Nobody will ever train it: one of them would stop all trimming for good."""
    log = Log()
    log.play("a", lineage="")
    assert log.limit == log.last
    assert len(log.retention) == 0


def test_what_a_cut_lineage_trained_is_needed_again() -> None:
    log = Log()
    first = log.play("a")
    log.step(1, "a")
    log.train(LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=0))
    log.checkpoint(1, lineage="l1")
    assert log.limit == first - 1
    log.step(1, "a", lineage="l2")
    log.checkpoint(1, lineage="l2")
    assert log.limit == log.last


def test_what_is_settled_behind_an_open_episode_is_named_until_it_is_removed_and_again_once_it_was_settled_again() -> None:
    log = Log()
    first = log.play("open")
    log.play("a")
    log.step(1, "a")
    log.checkpoint(1)
    assert log.limit == first - 1
    assert log.retention.list_settled(log.last - 1, most=9) == []
    assert log.retention.list_settled(log.last, most=9) == ["a"]
    log.retention.mark_removed("a", log.last)
    assert log.retention.list_settled(log.last, most=9) == []
    log.train(LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=0))
    log.step(1, "a", lineage="l2")
    log.checkpoint(1, lineage="l2")
    assert log.retention.list_settled(log.last, most=9) == ["a"]
    log.retention.mark_removed("a", log.last - 1)
    assert log.retention.list_settled(log.last, most=9) == ["a"], "what was removed before it was settled again"


def test_what_nobody_trains_is_named_behind_an_open_episode_once_it_has_a_result() -> None:
    log = Log()
    log.play("open")
    log.play("a", lineage="")
    assert log.retention.list_settled(log.last - 1, most=9) == []
    assert log.retention.list_settled(log.last, most=9) == ["a"]
    assert log.retention.list_settled(log.last, most=9, trimmed=log.last) == []
    log.retention.mark_removed("a", log.last)
    assert log.retention.list_settled(log.last, most=9) == []


def test_what_is_open_again_is_not_named_because_somebody_else_asked_for_it_and_had_a_result() -> None:
    log = Log()
    log.play("open")
    log.play("a")
    log.step(1, "a")
    log.checkpoint(1)
    log.play("a", lineage="")
    log.train(LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=0))
    assert log.retention.list_settled(log.last, most=9) == []


def test_a_fence_on_the_policy_subject_starts_no_second_lineage() -> None:
    log = Log()
    log.play("a")
    log.step(1, "a")
    log.enter(S.policy("default"), LineageStarted(lineage="l1", worker="w"))
    log.checkpoint(1)
    assert log.limit == log.last


def test_what_the_end_of_training_excludes_is_kept_for_a_run_that_goes_on() -> None:
    log = Log()
    first = log.play("a")
    log.train(TrainingFinished(lineage="l1", step=0, version=0, excluded=(Exclusion(episode_id="a", reason="r"),)))
    log.checkpoint(0)
    assert log.limit == first - 1


def test_content_of_episodes_that_nobody_requested_holds_nothing_back() -> None:
    log = Log()
    log.enter(S.observation("p", "any", "stray"))
    assert log.limit == log.last


def test_without_the_content_of_before_everything_after_the_request_of_an_open_episode_is_kept() -> None:
    """As a recorder that goes on reads the log: what is in its archive already is not read again."""
    log = Log()
    log.play("settled")
    log.step(1, "settled")
    log.checkpoint(1)
    request = EpisodeRequested(
        episode_id="open", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="p", deadline_ns=1,
        lineage="l1",
    )  # fmt: skip
    requested = log.enter(S.task("default", "open"), request)
    log.last += 2  # an observation and an action of it
    log.retention.mark_content_skipped()
    assert log.limit == requested - 1
    log.enter(S.observation("p", "any", "open"))
    assert log.limit == requested - 1
    log.step(2, "open")
    log.checkpoint(2)
    assert log.limit == log.last
