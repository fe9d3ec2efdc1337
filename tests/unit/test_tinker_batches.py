"""Requests to a Tinker service and reading of its answers, without one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.tinker_batches import TinkerMetrics, build_datum_arrays


def sequence(advantage: float = 2.0, *, version: int = 4) -> TrainingSequence:
    mask = np.array([False, False, True, True, False, True])
    return TrainingSequence(
        episode_id="e",
        group_id="g",
        ids=np.array([10, 11, 12, 13, 14, 15], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-1.0), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        versions=np.where(mask, version, -1).astype(np.int32),
    )


def test_targets_are_the_next_tokens_and_only_sampled_ones_have_an_advantage() -> None:
    arrays = build_datum_arrays(sequence(), tokens=8)
    assert arrays.inputs == [10, 11, 12, 13, 14]
    assert arrays.loss_inputs["target_tokens"].tolist() == [11, 12, 13, 14, 15]
    assert arrays.loss_inputs["advantages"].tolist() == [0, 0.25, 0.25, 0, 0.25]
    assert arrays.loss_inputs["logprobs"].tolist() == [0, -1, -1, 0, -1]


def test_metrics_follow_from_ratios_over_sampled_tokens_alone() -> None:
    measured = TinkerMetrics(0.2, 0.28)
    answered = np.array([9.0, -1 + math.log(1.5), -1.0, 9.0, -1 + math.log(0.5)], np.float32)
    measured.add(sequence(), answered, fresh=4)
    metrics = measured.metrics()
    assert metrics["loss"] == pytest.approx(-2.0 * (1.5 + 1.0 + 0.5) / 3)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["logprob_difference_max"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["kl"] == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3, rel=1e-5)


def test_differences_are_told_of_the_weights_that_sampled_only() -> None:
    measured = TinkerMetrics(0.2, 0.28)
    measured.add(sequence(version=3), np.zeros(5, np.float32), fresh=4)
    assert math.isnan(measured.metrics()["logprob_difference_max"])
    assert math.isnan(TinkerMetrics(0.2, 0.2).metrics()["loss"])
