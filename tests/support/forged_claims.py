"""Claims of learners that the log does not bear out, forged into a valid log: judged rewards, exclusions, addresses."""

from __future__ import annotations

from tests.support.log_builder import LogBuilder

SETTINGS = {"learner": {"max_staleness": 1, "min_group_size": 2}, "group_judge": {"weight": 0.5}}


def rewards_without_a_judge(log_builder: LogBuilder) -> None:
    log_builder.lineage("l2", parent="l1", settings={"group_judge": {"weight": 0.0}})
    log_builder.play("a")
    log_builder.step(1, ["a"], lineage="l2", rewards={"a": 9.0}, scores={"a": 1.0})


def rewards_that_no_score_explains(log_builder: LogBuilder) -> None:
    log_builder.lineage("l2", parent="l1", settings=SETTINGS)
    log_builder.play("a")
    log_builder.play("b")
    log_builder.step(1, ["a", "b"], lineage="l2", rewards={"a": 9.0, "b": 1.5}, scores={"a": 1.0, "b": 1.0})


def rewards_without_scores(log_builder: LogBuilder) -> None:
    log_builder.lineage("l2", parent="l1", settings=SETTINGS)
    log_builder.play("a")
    log_builder.step(1, ["a"], lineage="l2", rewards={"a": 1.5})


def fresh_episode_told_as_stale(log_builder: LogBuilder) -> None:
    log_builder.lineage("l2", parent="l1", settings=SETTINGS)
    log_builder.play("a", policy_versions=(0,))
    log_builder.step(1, [], lineage="l2")
    log_builder.step(2, [], {"a": "stale"}, lineage="l2")


def graded_episode_told_as_failed(log_builder: LogBuilder) -> None:
    log_builder.play("a", reward=0.0)
    log_builder.step(1, [], {"a": "env_failed"})


def failed_episode_told_as_stale(log_builder: LogBuilder) -> None:
    log_builder.play("a", outcome="env_failed", reward=None)
    log_builder.step(1, [], {"a": "stale"})


def whole_group_told_as_too_small(log_builder: LogBuilder) -> None:
    log_builder.lineage("l2", parent="l1", settings=SETTINGS)
    for episode in ("a", "b"):
        log_builder.play(episode)
    log_builder.step(1, [], {"a": "group_too_small", "b": "group_too_small"}, lineage="l2")


def signal_told_as_none(log_builder: LogBuilder) -> None:
    log_builder.play("a", reward=0.0)
    log_builder.play("b", reward=1.0)
    log_builder.step(1, [], {"a": "no_signal", "b": "no_signal"})


def end_told_before_it(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, [], {"a": "training_finished"})


def version_of_another_name(log_builder: LogBuilder) -> None:
    log_builder.version(1, uri="file:///weights/l1-v000009.safetensors")


def version_in_another_place(log_builder: LogBuilder) -> None:
    log_builder.version(1, uri="file:///weights/l1-v000001.safetensors")
    log_builder.version(2, uri="http://elsewhere/l1-v000002.safetensors")


def checkpoint_in_another_place(log_builder: LogBuilder) -> None:
    log_builder.checkpoint(0, file="/run/checkpoints/l1-000000")
    log_builder.checkpoint(0, file="/elsewhere/l1-000000")


def checkpoint_of_another_name(log_builder: LogBuilder) -> None:
    log_builder.checkpoint(0, file="/run/checkpoints/l1-000004")


def lineage_behind_what_the_log_has(log_builder: LogBuilder) -> None:
    log_builder.step(1, [])
    log_builder.checkpoint(4)
    log_builder.lineage("l2", parent="l1", parent_step=4)
    log_builder.step(5, [], lineage="l2")
