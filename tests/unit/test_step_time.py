"""The time of a step, beside the same arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.config.profile import replace_settings
from fleetbus.config.settings import Configuration, EpisodeSettings, InferenceSettings, LearnerSettings, TrainerSettings
from fleetbus_workers.up.memory import ModelShape, Parts, read_shape
from fleetbus_workers.up.step_time import Device, count_active, count_flops, count_read, estimate_step, format_step

DENSE = ModelShape(layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32, tied=True)
DEVICE = Device(flops=1e6, bandwidth=1e6, link=1e6, mfu=0.5, bandwidth_share=0.5, link_share=0.5)
ENGINE = Parts(name="inference", parts={"cache": 1 << 30})
WEIGHTS = 2 * (2 * 8 * 4 * (2 + 1) + 3 * 8 * 16) + 32 * 8
"""Two layers of queries, outputs, keys and values, and the feed-forward part; the head."""


def configure(**trainer: Any) -> Configuration:
    return Configuration(
        learner=LearnerSettings(groups=2, group_size=4),
        episode=EpisodeSettings(max_episode_tokens=100, max_turns=3, max_tokens=20),
        inference=InferenceSettings(max_num_seqs=4, dtype="bfloat16", engine="vllm"),
        trainer=TrainerSettings(token_budget=200, **trainer),
    )


def test_a_token_costs_two_operations_per_weight_and_its_attention_to_half_of_the_sequence() -> None:
    assert count_active(DENSE) == WEIGHTS
    assert count_flops(DENSE, 100) == 2 * WEIGHTS + 2 * (2 * 2 * 4) * 100 / 2 * 2


@pytest.mark.parametrize(
    ("trainer", "passes", "bytes_moved"),
    [({}, 3, 8), ({"gradient_checkpointing": True}, 4, 8), ({"lora_rank": 4}, 2, 4), ({"epochs": 2}, 6, 16)],
)
def test_training_is_operations_over_the_share_of_the_peak(trainer: dict[str, Any], passes: int, bytes_moved: int) -> None:
    step = estimate_step(DENSE, configure(**trainer), processes=2, engines=0, engine=None, device=DEVICE)
    assert step.tokens == 800 and step.training == pytest.approx(passes * 800 * count_flops(DENSE, 100) / (2 * 0.5e6))
    assert step.moving == pytest.approx(800 / (2 * 200) * bytes_moved * DENSE.parameters / 0.5e6)
    assert step.sampling == 0.0 and "sampling" not in format_step(step)[0]


def test_sampling_reads_weights_and_cache_for_each_token_of_the_sequences_that_run() -> None:
    step = estimate_step(DENSE, configure(), processes=0, engines=2, engine=ENGINE, device=DEVICE)
    read = 2 * DENSE.parameters + 4 * (2 * 2 * 1 * 4) * 2 * 50
    rate = 4 * 0.5e6 / read
    assert step.tokens_per_second == pytest.approx(rate)
    assert step.sampling == pytest.approx((8 * 60 / rate + 8 * 40 * count_flops(DENSE, 100) / 0.5e6) / 2)
    assert step.training == step.moving == 0.0


@pytest.mark.parametrize(("engine", "dtype", "weight", "cached"), [("vllm", "float32", 4, 4), ("torch", "bfloat16", 2, 4)])
def test_numbers_are_read_as_the_engine_keeps_them(engine: Any, dtype: Any, weight: int, cached: int) -> None:
    wanted = replace_settings(configure(), {"inference.engine": engine, "inference.dtype": dtype})
    step = estimate_step(DENSE, wanted, processes=0, engines=2, engine=ENGINE, device=DEVICE)
    read = weight * DENSE.parameters + 4 * (2 * 2 * 1 * 4) * cached * 50
    assert step.tokens_per_second == pytest.approx(4 * 0.5e6 / read)


def test_gpus_that_share_a_model_read_a_part_each_and_sum_twice_in_a_layer() -> None:
    wanted = replace_settings(configure(), {"inference.vllm": '{"tensor_parallel_size": 2}'})
    step = estimate_step(DENSE, wanted, processes=0, engines=2, engine=ENGINE, device=DEVICE)
    read = 2 * DENSE.parameters + 4 * (2 * 2 * 1 * 4) * 2 * 50
    summed = 2 * 2 * (2 * 4 * 8 / 0.5e6 + DEVICE.latency)
    assert step.tokens_per_second == pytest.approx(4 / (read / (2 * 0.5e6) + summed) / 2)


def test_a_cache_for_few_sequences_slows_sampling() -> None:
    small = Parts(name="inference", parts={"cache": 2 * 100 * (2 * 2 * 1 * 4) * 2})
    slow = estimate_step(DENSE, configure(), processes=0, engines=2, engine=small, device=DEVICE)
    assert (
        slow.tokens_per_second
        < estimate_step(DENSE, configure(), processes=0, engines=2, engine=ENGINE, device=DEVICE).tokens_per_second
    )


def test_a_step_takes_the_longer_of_both_unless_one_waits_for_the_other() -> None:
    beside = estimate_step(DENSE, configure(), processes=1, engines=1, engine=ENGINE, device=DEVICE)
    assert beside.seconds == max(beside.training, beside.sampling)
    synchronous = configure()
    synchronous = Configuration(
        learner=LearnerSettings(groups=2, group_size=4, max_staleness=0), episode=synchronous.episode,
        inference=synchronous.inference, trainer=synchronous.trainer,
    )  # fmt: skip
    after = estimate_step(DENSE, synchronous, processes=1, engines=1, engine=ENGINE, device=DEVICE)
    assert after.seconds == after.training + after.sampling and "takes both" in format_step(after)[0]


def test_of_experts_those_are_read_that_any_sequence_takes() -> None:
    sizes = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    experts = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    shape = read_shape(sizes | experts)
    assert count_read(shape, 1) == pytest.approx(count_active(shape))
    assert count_read(shape, 1000) == pytest.approx(shape.parameters, rel=0.01)
