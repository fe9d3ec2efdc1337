"""Memory that a model needs of each GPU: counted from its configuration, compared with real models, printed and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fleetbus.config.engine_arguments import count_engine_gpus
from fleetbus.config.profile import FITTED, replace_settings
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.cli.train.plan import command
from fleetbus_workers.inference.torch.slots import SlotCache
from fleetbus_workers.up import command as up
from fleetbus_workers.up.memory import TORCH_REMEMBERED_BYTES, plan_engine, plan_learner, plan_torch_engine, read_shape
from fleetbus_workers.up.placement import place_roles
from fleetbus_workers.up.plan import build_plan, format_plan
from fleetbus_workers.up.profile import fit_machine
from tests.support.model_configs import MODELS
from tests.support.trainable_model import CONFIGS

PUBLISHED = {"Qwen/Qwen3-8B": 8.19e9, "Qwen/Qwen3-32B": 32.76e9, "Qwen/Qwen3-30B-A3B": 30.53e9}
"""Sizes of the models' safetensors files on the Hub."""

DOCS = Path(__file__).parents[2] / "docs/gpu.md"
EIGHT = tuple(map(str, range(8)))
GB80 = int(80e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-8B"]))
    return tmp_path


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs, as far as `up` can tell, and vLLM in an environment of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(EIGHT))
    monkeypatch.setattr(up, "find_memory", lambda: GB80)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_known_models_are_those_of_their_files(name: str) -> None:
    assert read_shape(MODELS[name]).parameters == pytest.approx(PUBLISHED[name], rel=0.001)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe"])
def test_parameters_are_those_that_transformers_makes(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    config = CONFIGS[kind]
    made = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert read_shape(config.to_dict()).parameters == pytest.approx(made, rel=0.01)


def test_shards_of_more_processes_are_smaller_and_adapters_have_little_to_optimise() -> None:
    shape, plain = read_shape(MODELS["Qwen/Qwen3-8B"]), Configuration()
    four, eight = (plan_learner(shape, plain, processes).parts for processes in (4, 8))
    assert four["weights"] == pytest.approx(2 * eight["weights"]) and four["optimizer"] == pytest.approx(2 * four["weights"])
    adapted = fit(Configuration(), {}, **{"trainer.lora_rank": 32})
    parts = plan_learner(shape, adapted, 4).parts
    assert parts["weights"] > four["weights"] and parts["optimizer"] < 0.1 * four["optimizer"]
    offloaded = plan_learner(shape, fit(plain, {}, **{"trainer.offload_optimizer": True}), 4)
    assert offloaded.parts == {name: size for name, size in four.items() if name != "optimizer"}
    assert offloaded.moments == four["optimizer"]
    assert plan_learner(shape, fit(plain, {}, **{"trainer.shard_processes": 4}), 8).parts == four, "two copies of four"


def fit(configuration: Configuration, given: dict[str, str], **values: Any) -> Configuration:
    return replace_settings(configuration, values)


def test_what_no_configuration_says_is_named() -> None:
    with pytest.raises(UserError, match=r"config.json has no num_hidden_layers"):
        read_shape({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9})


def run_plan(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(command, ["--model", str(folder), *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "gpus", "more"),
    [
        ("Qwen/Qwen3-1.7B", 1, []),
        ("Qwen/Qwen3-8B", 8, []),
        ("Qwen/Qwen3-32B", 16, []),
        ("Qwen/Qwen3-30B-A3B", 8, []),
        ("Qwen/Qwen3-30B-A3B", 8, ["--trainer-lora-rank", "32"]),
    ],
)
def test_the_documentation_shows_what_the_command_prints(tmp_path: Path, name: str, gpus: int, more: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))

    result = run_plan(tmp_path, "--gpus", str(gpus), *more)

    printed = result.output.replace(str(tmp_path), name).splitlines()
    shown = DOCS.read_text()
    assert all(line in shown for line in printed if not line.startswith(("chosen", "profile"))), result.output
    assert f"fleetbus plan --model {name} --gpus {gpus}{''.join(f' {each}' for each in more)}\n" in shown
    assert result.return_value == (1 if "DOES NOT FIT" in result.output else 0)


def test_a_plan_follows_settings_that_are_given(folder: Path) -> None:
    printed = run_plan(folder, "--gpus", "8", "--inference-workers", "2", "--trainer-token-budget", "9000").output
    assert "6 processes" in printed and "9,000 tokens at a time" in printed
    assert "trainer.token_budget = 9000" in printed and "chosen for 8 GPU(s) of 86 GB" in printed


def test_a_machine_with_gpus_gets_settings_of_a_real_model_and_says_so(folder: Path) -> None:
    configuration = Configuration(run=RunSettings(model=str(folder)))
    given = {"learner.learning_rate": "--learner-learning-rate"}

    fitted, chosen = fit_machine(configuration, given, EIGHT, GB80, read_shape(MODELS["Qwen/Qwen3-8B"]), starts=False)

    assert (fitted.inference.engine, fitted.inference.dtype, fitted.trainer.precision) == ("vllm", "bfloat16", "bfloat16")
    assert fitted.learner.learning_rate == configuration.learner.learning_rate, "it was given"
    assert fitted.algorithm == configuration.algorithm, "one objective on every machine"
    assert fitted.inference.workers == 4 and "\n" not in chosen
    assert "learning_rate" not in chosen and "8 GPU(s) of 80 GB" in chosen and "8.2 B" in chosen


def test_the_starter_policy_and_machines_without_gpus_keep_the_defaults(folder: Path) -> None:
    mine = Configuration(run=RunSettings(model=str(folder)))
    for configuration, gpus in ((Configuration(), EIGHT), (mine, ())):
        fitted, chosen = fit_machine(configuration, {}, gpus, GB80, None)
        assert fitted == fit(configuration, {}, **{"run.profile": "laptop"}) and not chosen


def test_the_learner_gets_more_gpus_than_half_when_it_needs_them() -> None:
    mine = Configuration(run=RunSettings(model="m"))
    shape = read_shape(MODELS["Qwen/Qwen3-32B"])
    fitted, _ = fit_machine(mine, {}, EIGHT, GB80, shape, starts=False)
    assert fitted.inference.workers == 1 and count_engine_gpus(fitted.inference.vllm) == 2
    assert not build_plan(shape, fitted, place_roles(fitted, EIGHT), GB80).shortages


@pytest.mark.parametrize(("name", "gpus"), [("Qwen/Qwen3-8B", 8), ("Qwen/Qwen3-32B", 16), ("Qwen/Qwen3-30B-A3B", 8)])
def test_the_plan_that_up_would_take_is_one_that_trains_and_leaves_room_for_fragments(
    tmp_path: Path, name: str, gpus: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    result = run_plan(tmp_path, "--gpus", str(gpus))
    assert result.return_value == 0 and "a step takes the longer" in result.output
    totals = [float(line.partition(" = ")[2].partition(" of ")[0]) for line in result.output.splitlines() if ": fits" in line]
    assert len(totals) == 2 and max(totals) <= 0.95 * (81_559 << 20) / 1e9


def test_of_several_machines_the_learner_gets_whole_ones() -> None:
    mine, sixteen = Configuration(run=RunSettings(model="m")), tuple(map(str, range(16)))
    fitted, _ = fit_machine(mine, {}, sixteen, GB80, read_shape(MODELS["Qwen/Qwen3-32B"]), starts=False)
    assert place_roles(fitted, sixteen).machines == (1,)
    assert place_roles(fit(fitted, {}, **{"inference.workers": 1}), sixteen).machines == (0, 1)


def test_the_optimizer_goes_to_the_cpu_only_where_the_machine_has_that_memory() -> None:
    mine, shape = Configuration(run=RunSettings(model="m")), read_shape(MODELS["Qwen/Qwen3-30B-A3B"])

    def choose(**more: Any) -> bool:
        return fit_machine(mine, more.pop("given", {}), EIGHT, GB80, shape, starts=False, **more)[0].trainer.offload_optimizer

    assert choose() and choose(cpu_memory=700 << 30)
    assert not choose(cpu_memory=500 << 30)
    assert not choose(given={"trainer.offload_optimizer": "fleetbus.toml"})


def test_as_many_episodes_are_played_as_the_engines_decode_and_staleness_allows() -> None:
    mine, shape = Configuration(run=RunSettings(model="m")), read_shape(MODELS["Qwen/Qwen3-8B"])
    mine = fit(mine, {}, **{"inference.max_model_len": 8192, "episode.max_episode_tokens": 8192})
    fitted, _ = fit_machine(mine, {}, EIGHT, GB80, shape, starts=False)
    assert (fitted.inference.max_num_seqs, fitted.inference.slots, fitted.environment.slots) == (80, 160, 256)
    few, _ = fit_machine(fit(mine, {}, **{"learner.groups": 8}), {}, EIGHT, GB80, shape, starts=False)
    assert few.environment.slots == 8 * 8 * 2
    shared = fit(mine, {}, **{"environment.workers": 3})
    assert fit_machine(shared, {}, EIGHT, GB80, shape, starts=False)[0].environment.slots == 86


@pytest.mark.parametrize(
    ("name", "gpus", "given", "each"),
    [
        ("Qwen/Qwen3-8B", 8, {}, 1),
        ("Qwen/Qwen3-32B", 16, {}, 4),
        ("Qwen/Qwen3-30B-A3B", 8, {}, 2),
        ("Qwen/Qwen3-32B", 8, {}, 2),
        ("Qwen/Qwen3-32B", 16, {"inference.vllm": "--inference-vllm"}, 1),
        ("Qwen/Qwen3-32B", 16, {"inference.workers": "--inference-workers"}, 1),
        ("Qwen/Qwen3-32B", 2, {}, 1),
    ],
)
def test_a_large_model_is_split_while_that_pays_and_the_learner_fits_unless_it_was_said_how(
    name: str, gpus: int, given: dict[str, str], each: int
) -> None:
    """With two GPUs, half of them is one; on eight the learner of 32B needs six."""
    mine = Configuration(run=RunSettings(model="m"))
    fitted, _ = fit_machine(mine, given, tuple(map(str, range(gpus))), GB80, read_shape(MODELS[name]), starts=False)
    assert count_engine_gpus(fitted.inference.vllm) == each


def test_an_engine_on_two_gpus_holds_half_on_each_and_its_caches_count_together() -> None:
    shape, plain = read_shape(MODELS["Qwen/Qwen3-32B"]), Configuration()
    split = fit(
        plain, {}, **{"inference.vllm": '{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}', "inference.dtype": "auto"}
    )
    parts = plan_engine(shape, split, GB80).parts
    assert parts["weights"] == shape.parameters
    assert parts["weights"] + parts["cache"] + parts["activations"] == int(0.8 * GB80)


@pytest.mark.usefixtures("fleet")
def test_engine_torch_is_refused_by_name_where_there_are_gpus_unless_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mine = Configuration(run=RunSettings(model=str(folder)))
    with pytest.raises(UserError, match="this machine has GPUs and no vLLM"):
        up.fit_gpus(mine, {})
    asked = up.fit_gpus(mine, {"inference.engine": "--inference-engine"})
    assert asked.inference.engine == "torch" and asked.trainer.device == "cuda" and asked.inference.dtype == "float32"


@pytest.mark.usefixtures("fleet")
def test_up_refuses_a_learner_whose_numbers_alone_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-32B"]))
    mine = fit(Configuration(run=RunSettings(model=str(folder))), {}, **{"inference.python": "python", "inference.workers": 4})
    with pytest.raises(UserError, match=r"need 131.0 GB on each of its GPUs, which have 80.0: more GPUs"):
        up.fit_gpus(mine, {"inference.workers": "--inference-workers"})


@pytest.mark.parametrize("given", [{}, {"trainer.device": "cpu"}])
def test_a_single_gpu_goes_to_the_learner_unless_that_stays_on_the_cpu(folder: Path, given: dict[str, str]) -> None:
    mine = Configuration(run=RunSettings(model=str(folder)))
    fitted, chosen = fit_machine(mine, given, ("0",), GB80, None, starts=False)
    placement = place_roles(fitted, ("0",))
    if given:
        assert placement.inference == (("0",),) and not placement.learner and fitted.trainer.precision == "float32"
    else:
        assert placement.learner == ("0",) and fitted.inference.engine == "torch"
        assert chosen.endswith(": engine torch on the CPU")


def test_models_are_sampled_on_the_only_gpu_as_far_as_there_is_room(folder: Path) -> None:
    mine = Configuration(run=RunSettings(model=str(folder)))
    small = read_shape(MODELS["Qwen/Qwen3-8B"] | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28})
    for shape, device in ((small, "cuda"), (read_shape(MODELS["Qwen/Qwen3-8B"]), "cpu")):
        fitted, chosen = fit_machine(mine, {}, ("0",), GB80, shape, starts=False)
        assert fitted.inference.device == device
        assert chosen.endswith(f": engine torch on the {'GPU' if device == 'cuda' else 'CPU'}")
        placement = place_roles(fitted, ("0",))
        assert placement.learner == ("0",) and placement.inference == (("0",) if device == "cuda" else (),)
    fitted, _ = fit_machine(mine, {"inference.device": ""}, ("0",), GB80, small, starts=False)
    assert fitted.inference.device == "cpu"
    longer = {"inference.max_model_len": 8192, "episode.max_episode_tokens": 8192, "inference.max_num_seqs": 16}
    forced = replace_settings(fitted, {"inference.device": "cuda", **longer})
    (shortage,) = build_plan(small, forced, place_roles(forced, ("0",)), GB80).shortages
    assert shortage.startswith("roles that share a GPU need ") and "inference.device = cpu" in shortage


@pytest.mark.parametrize(
    ("given", "cpu_memory", "offloads", "sequences"),
    [
        ({}, 0, True, 8),
        ({}, 30 << 30, False, 3),
        ({"trainer.offload_optimizer": ""}, 0, False, 3),
        ({"inference.max_num_seqs": ""}, 0, None, None),
    ],
)
def test_on_a_single_gpu_fewer_sequences_and_the_optimizer_on_the_cpu_make_room_for_sampling(
    given: dict[str, str], cpu_memory: int, offloads: bool | None, sequences: int | None
) -> None:
    """1.7 B parameters train and are sampled on one H100; with 32 sequences, which somebody asked for, on the CPU."""
    mine = fit(Configuration(run=RunSettings(model="m")), {}, **dict.fromkeys(FITTED, 8192))
    shape = read_shape(MODELS["Qwen/Qwen3-1.7B"])
    fitted, chosen = fit_machine(mine, given, ("0",), 81_559 << 20, shape, starts=False, cpu_memory=cpu_memory)
    if sequences is None:
        assert fitted.inference.device == "cpu" and not fitted.trainer.offload_optimizer
        return
    assert (fitted.inference.device, fitted.inference.max_num_seqs) == ("cuda", sequences)
    assert fitted.trainer.offload_optimizer == offloads and f"inference.max_num_seqs = {sequences}" in chosen
    assert not build_plan(shape, fitted, place_roles(fitted, ("0",)), 81_559 << 20).shortages


def test_engine_torch_is_planned_with_what_its_slots_hold_once_one_history_is_long() -> None:
    shape = read_shape(MODELS["Qwen/Qwen3-8B"])
    settings = {"inference.max_model_len": 2048, "episode.max_episode_tokens": 2048, "inference.max_num_seqs": 4}
    planned = plan_torch_engine(shape, replace_settings(Configuration(), settings)).parts["cache"] - TORCH_REMEMBERED_BYTES
    cache = SlotCache(4, 2048, spare=1)
    place: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("meta")}
    heads = (shape.layers, 0, shape.kv_heads)
    cache.add((*heads, shape.head_dim, 0), slot=1, time=4, **place)
    cache.add((*heads, 0, shape.head_dim), slot=1, time=3, **place)
    cache.reserve(1100)
    before = sum(block.tensor.nbytes for block in cache.blocks)
    cache.reserve(2048)
    held = sum(block.tensor.nbytes for block in cache.blocks)
    assert held <= held + before / 2 <= planned < 2 * held, "the last block that grows is there twice"


def test_lines_name_what_does_not_fit(folder: Path) -> None:
    mine = Configuration(run=RunSettings(model=str(folder)))
    shape = read_shape(MODELS["Qwen/Qwen3-30B-A3B"])
    fitted, _ = fit_machine(mine, {"trainer.offload_optimizer": ""}, EIGHT, GB80, shape, starts=False)
    plan = build_plan(shape, fitted, place_roles(fitted, EIGHT), GB80)
    assert plan.shortages and "optimizer" in plan.shortages[0]
    assert any("DOES NOT FIT" in line for line in format_plan(plan, "m"))
