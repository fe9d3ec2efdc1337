"""Settings that follow a machine and its model: the profile first, then how the GPUs of this machine are used.

What is chosen beyond the profile is said in one line; what anybody set stays.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fleetbus.config.engine_arguments import count_engine_gpus
from fleetbus.config.profile import apply_profile, format_setting, replace_settings
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.up.memory import ModelShape, count_usable, plan_engine, plan_learner, plan_torch_engine
from fleetbus_workers.up.model_limits import fit_run
from fleetbus_workers.up.placement import GPUS_PER_MACHINE
from fleetbus_workers.up.plan import find_shape

ENOUGH_TOKENS = 65_536
"""In an engine's cache, eight sequences of 8,192: with fewer, each token waits for the weights to be read nearly for itself."""

LEAST_SEQUENCES = 16
MOST_SEQUENCES = 256
"""Sequences that one engine decodes at a time."""


def fit_machine(
    configuration: Configuration,
    given: Mapping[str, str],
    gpus: Sequence[str],
    memory: int,
    shape: ModelShape | None,
    *,
    starts: bool = True,
    cpu_memory: int = 0,
) -> tuple[Configuration, str]:
    """The configuration for all roles on this machine, and one line that says what was chosen; empty if nothing was.
    ``memory``: bytes of the smallest GPU, 0 if unknown; ``shape`` None if the model's is unknown; ``cpu_memory``: bytes of the
    machine, 0 if unknown. Raises `UserError` if the engine is not there, unless nothing ``starts``."""
    fitted = apply_profile(configuration, given, has_gpus=bool(gpus))
    if fitted.run.profile != "gpu" or not gpus:
        return fitted, ""
    if len(gpus) == 1 and fitted.trainer.device != "cpu" and "inference.engine" not in given:
        # vLLM takes nearly all of a GPU's memory, and training gains more from it.
        fitted = msgspec.structs.replace(fitted, inference=configuration.inference)
    if fitted.inference.engine == "torch" and "inference.device" not in given and _has_room(fitted, len(gpus), memory, shape):
        fitted = replace_settings(fitted, {"inference.device": "cuda"})
    if starts and fitted.inference.engine == "vllm" and "inference.engine" not in given:
        _check_engine(fitted)
    chosen = _choose_for_engines(fitted, given, len(gpus), memory, shape, cpu_memory) if len(gpus) > 1 else {}
    fitted = replace_settings(fitted, chosen)
    size = f", {shape.parameters / 1e9:.1f} B parameters" if shape is not None else ""
    of = f" of {memory / 1e9:.0f} GB" if memory else ""
    words = [f"{name} = {format_setting(value)}" for name, value in chosen.items()]
    if fitted.inference.engine == "torch":
        words.append(f"engine torch on the {'CPU' if fitted.inference.device == 'cpu' else 'GPU'}")
    return fitted, f"chosen for {len(gpus)} GPU(s){of} and a model of yours{size}: {', '.join(words)}" if words else ""


def _has_room(configuration: Configuration, gpus: int, memory: int, shape: ModelShape | None) -> bool:
    """True if engines torch fit on GPUs of their own, or where there are too few beside the learner."""
    if shape is None or not memory:
        return False
    workers, trains_there = configuration.inference.workers, configuration.trainer.device != "cpu"
    if gpus >= workers + trains_there:
        return plan_torch_engine(shape, configuration).total <= count_usable(memory)
    learner = plan_learner(shape, configuration, gpus).total if trains_there else 0
    return learner + workers * plan_torch_engine(shape, configuration).total <= count_usable(memory)


def _choose_for_engines(
    configuration: Configuration, given: Mapping[str, str], gpus: int, memory: int, shape: ModelShape | None, cpu_memory: int
) -> dict[str, object]:
    """Choose how vLLM's engines share ``gpus`` with the learner, and how much they are given at a time."""
    if configuration.inference.engine != "vllm":
        return {}
    chosen: dict[str, object] = {}

    def choose(name: str, value: object) -> Configuration:
        if name not in given:
            chosen[name] = value
        return replace_settings(configuration, chosen)

    fitted, may_offload = configuration, "trainer.offload_optimizer" not in given
    if "inference.vllm" not in given and "inference.workers" not in given:
        fitted = split_engine(fitted, gpus, memory, shape)
        if fitted.inference.vllm:
            fitted = choose("inference.vllm", fitted.inference.vllm)
    workers = [fitted.inference.workers] if "inference.workers" in given else _list_workers(fitted, gpus)
    count, offload = choose_workers(fitted, workers, gpus, memory, shape, cpu_memory, may_offload=may_offload)
    if offload:
        choose("trainer.offload_optimizer", True)
    fitted = choose("inference.workers", count)
    if shape is not None and memory:
        fitted = choose("inference.max_num_seqs", count_sequences(shape, fitted, memory))
    fitted = choose("inference.slots", max(2 * fitted.inference.max_num_seqs, 2))
    choose("environment.slots", count_episodes(fitted))
    return chosen


def count_sequences(shape: ModelShape, configuration: Configuration, memory: int) -> int:
    """Sequences that an engine may decode at a time: twice what its cache holds at full length, as they are half as long on
    average. vLLM makes room for what does not fit, and admission follows it (`fleetbus.core.training.engine_pressure`)."""
    engine = plan_engine(shape, configuration, memory)
    length = min(configuration.inference.max_model_len, configuration.episode.max_episode_tokens)
    split = count_engine_gpus(configuration.inference.vllm)
    room = split * engine.parts["cache"] // (shape.count_cached() * 2 * length)
    return int(min(max(2 * room // 8 * 8, LEAST_SEQUENCES), MOST_SEQUENCES))


def count_episodes(configuration: Configuration) -> int:
    """Episodes that the environment workers play at a time, per worker: what the engines decode, but no more than staleness
    lets the learner ask for."""
    learner, inference = configuration.learner, configuration.inference
    asked = learner.groups * learner.group_size * (1 + learner.max_staleness)
    wanted = min(inference.workers * inference.max_num_seqs, asked)
    return max(-(-wanted // max(configuration.environment.workers, 1)), 1)


def _list_workers(configuration: Configuration, gpus: int) -> list[int]:
    """Numbers of inference workers to try, on half of the GPUs first. Of several machines the learner gets whole ones, where
    that can be: between machines its shards move at a tenth of the speed."""
    each = count_engine_gpus(configuration.inference.vllm)
    most = max(gpus // each if configuration.trainer.device == "cpu" else gpus // 2 // each, 1)
    counts = list(range(most, 0, -1))
    whole = [count for count in counts if (gpus - count * each) % GPUS_PER_MACHINE == 0]
    return whole if gpus > GPUS_PER_MACHINE and whole else counts


def choose_workers(
    configuration: Configuration,
    counts: Sequence[int],
    gpus: int,
    memory: int,
    shape: ModelShape | None,
    cpu_memory: int = 0,
    *,
    may_offload: bool = True,
) -> tuple[int, bool]:
    """Choose the number of inference workers out of ``counts``: the first number that leaves the learner GPUs enough to fit, as
    it is or, second, with its optimizer in the CPU's memory; and which of both. The first of all if the shape is unknown, the
    last if it never fits."""
    if shape is None or not memory or configuration.trainer.device == "cpu":
        return counts[0], False
    each = count_engine_gpus(configuration.inference.vllm)
    offloaded = replace_settings(configuration, {"trainer.offload_optimizer": True})
    for tried, offload in ((configuration, False), (offloaded, True)) if may_offload else ((configuration, False),):
        for count in counts:
            processes = gpus - count * each
            learner = plan_learner(shape, tried, max(processes, 1))
            held = learner.moments * 5 // 2 * processes  # the optimizer's numbers, and a copy of all for a checkpoint
            if learner.total <= count_usable(memory) and not (offload and cpu_memory and held > cpu_memory):
                return count, offload
    return counts[-1], False


def fit_role(
    role: str, configuration: Configuration, given: Mapping[str, str], gpus: Sequence[str], memory: int = 0
) -> Configuration:
    """The configuration for one role on this machine: what `fit_machine` gives it, without what shares GPUs between roles. An
    inference worker has all that are visible."""
    fitted = apply_profile(fit_run(configuration, given), given, has_gpus=bool(gpus))
    shape = find_shape(Path(fitted.run.model)) if fitted.run.model else None
    if role != "inference" or fitted.run.profile != "gpu" or fitted.inference.engine != "vllm" or shape is None or not memory:
        return fitted
    chosen: dict[str, object] = {}
    if "inference.vllm" not in given:
        chosen["inference.vllm"] = split_engine(fitted, 2 * len(gpus), memory, shape).inference.vllm
    fitted = replace_settings(fitted, chosen)
    sequences = {"inference.max_num_seqs": count_sequences(shape, fitted, memory)}
    fitted = replace_settings(fitted, {name: value for name, value in sequences.items() if name not in given})
    slots = {"inference.slots": 2 * fitted.inference.max_num_seqs}
    return replace_settings(fitted, {name: value for name, value in slots.items() if name not in given})


def split_engine(configuration: Configuration, gpus: int, memory: int, shape: ModelShape | None) -> Configuration:
    """The configuration with tensor parallelism over the least GPUs, at most half of them, on which the model leaves a cache of
    `ENOUGH_TOKENS`; as it is if one suffices, or none do."""
    if shape is None or not memory:
        return configuration
    for size in (1, 2, 4, 8):
        if size > max(gpus // 2, 1) or shape.kv_heads % size:
            break
        arguments = msgspec.json.encode({"tensor_parallel_size": size}).decode() if size > 1 else ""
        tried = replace_settings(configuration, {"inference.vllm": arguments})
        engine = plan_engine(shape, tried, memory)
        if engine.total <= count_usable(memory) and size * engine.parts["cache"] >= ENOUGH_TOKENS * shape.count_cached() * 2:
            return tried
    return configuration


def _check_engine(configuration: Configuration) -> None:
    if not configuration.inference.python and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "this machine has GPUs and no vLLM: pip install 'fleetbus[vllm]', or name an interpreter that has it "
            "(--inference-python), or ask for --inference-engine torch, which is slower"
        )
