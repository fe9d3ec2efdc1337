"""Settings that follow a machine and its model: the profile first, then how the GPUs of this machine are used.

What is chosen beyond the profile is said in one line; what anybody set stays
(`docs/decisions/0251-gpus-are-shared-by-what-they-would-do.md`).
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
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
from fleetbus_workers.up.step_time import Device, estimate_step

ENOUGH_TOKENS = 65_536
"""In an engine's cache, eight sequences of 8,192: with fewer, each token waits for the weights to be read nearly for itself."""

WORTH_SPLITTING = 1.5
"""With fewer and larger engines, more is lost with each that dies: so many times as fast has to be worth it."""

LEAST_TORCH_SEQUENCES = 2
"""With which engine torch is still better off on a GPU than on the CPU."""

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
    fitting: dict[str, object] | None = None
    if fitted.inference.engine == "torch" and "inference.device" not in given:
        fitting = fit_torch_engines(fitted, given, len(gpus), memory, shape, cpu_memory)
        fitted = replace_settings(fitted, {"inference.device": "cuda"} if fitting is not None else {})
    if starts and fitted.inference.engine == "vllm" and "inference.engine" not in given:
        _check_engine(fitted)
    engines = _choose_for_engines(fitted, given, len(gpus), memory, shape, cpu_memory) if len(gpus) > 1 else {}
    fitted = replace_settings(fitted, chosen := (fitting or {}) | engines)
    size = f", {shape.parameters / 1e9:.1f} B parameters" if shape is not None else ""
    of = f" of {memory / 1e9:.0f} GB" if memory else ""
    words = [f"{name} = {format_setting(value)}" for name, value in chosen.items()]
    if fitted.inference.engine == "torch":
        words.append(f"engine torch on the {'CPU' if fitted.inference.device == 'cpu' else 'GPU'}")
    return fitted, f"chosen for {len(gpus)} GPU(s){of} and a model of yours{size}: {', '.join(words)}" if words else ""


def fit_torch_engines(
    configuration: Configuration, given: Mapping[str, str], gpus: int, memory: int, shape: ModelShape | None, cpu_memory: int
) -> dict[str, object] | None:
    """Settings with which engines torch fit on GPUs of their own, or where there are too few beside the learner: fewer
    sequences at a time, and the optimizer on the CPU if that makes room for more. None if they do not fit."""
    if shape is None or not memory:
        return None
    trains_there = configuration.trainer.device != "cpu"
    shared = gpus < configuration.inference.workers + trains_there
    wanted = configuration.inference.max_num_seqs
    least = wanted if "inference.max_num_seqs" in given else min(LEAST_TORCH_SEQUENCES, wanted)
    chosen: dict[str, object] = {}
    count = _count_torch_sequences(configuration, gpus, memory, shape, shared=shared)
    if shared and trains_there and count < min(LEAST_SEQUENCES, wanted) and "trainer.offload_optimizer" not in given:
        offloaded = replace_settings(configuration, {"trainer.offload_optimizer": True})
        more = _count_torch_sequences(offloaded, gpus, memory, shape, shared=True)
        if more > count and not _exceeds_cpu(plan_learner(shape, offloaded, gpus).moments * gpus, cpu_memory):
            count, chosen = more, {"trainer.offload_optimizer": True}
    if count < least:
        return None
    return chosen | ({"inference.max_num_seqs": count} if count < wanted else {})


def _count_torch_sequences(configuration: Configuration, gpus: int, memory: int, shape: ModelShape, *, shared: bool) -> int:
    """Sequences, at full length, that an engine torch has room for; what is asked for at most, and below 0 if not for one."""
    room = count_usable(memory)
    if shared:
        learner = plan_learner(shape, configuration, gpus).total if configuration.trainer.device != "cpu" else 0
        room = (room - learner) // configuration.inference.workers
    none, one = (
        plan_torch_engine(shape, replace_settings(configuration, {"inference.max_num_seqs": count})).total for count in (0, 1)
    )
    return min((room - none) // (one - none), configuration.inference.max_num_seqs)


def _exceeds_cpu(moments: int, cpu_memory: int) -> bool:
    """True if a machine has no memory for an optimizer of ``moments`` bytes and a copy of all for a checkpoint."""
    return bool(cpu_memory) and moments * 5 // 2 > cpu_memory


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

    def count_workers(tried: Configuration) -> int:
        counts = _list_workers(tried, gpus)
        return (find_workers(tried, counts, gpus, memory, shape, cpu_memory, may_offload=may_offload) or (0, False))[0]

    if "inference.vllm" not in given and "inference.workers" not in given:
        fitted = split_engine(fitted, gpus, memory, shape, count_workers)
        if fitted.inference.vllm:
            fitted = choose("inference.vllm", fitted.inference.vllm)
    workers = [fitted.inference.workers] if "inference.workers" in given else _list_workers(fitted, gpus)
    found = find_workers(fitted, workers, gpus, memory, shape, cpu_memory, may_offload=may_offload)
    count, offload = found or (workers[-1], False)
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


def find_workers(
    configuration: Configuration,
    counts: Sequence[int],
    gpus: int,
    memory: int,
    shape: ModelShape | None,
    cpu_memory: int = 0,
    *,
    may_offload: bool = True,
) -> tuple[int, bool] | None:
    """Find the number of inference workers out of ``counts``: the first number that leaves the learner GPUs enough to fit, as
    it is or, second, with its optimizer in the CPU's memory; and which of both. The first of all if the shape is unknown, None
    if it never fits."""
    if shape is None or not memory or configuration.trainer.device == "cpu":
        return counts[0], False
    each = count_engine_gpus(configuration.inference.vllm)
    offloaded = replace_settings(configuration, {"trainer.offload_optimizer": True})
    for tried, offload in ((configuration, False), (offloaded, True)) if may_offload else ((configuration, False),):
        for count in counts:
            processes = gpus - count * each
            learner = plan_learner(shape, tried, max(processes, 1))
            fits = learner.total <= count_usable(memory)
            if fits and not (offload and _exceeds_cpu(learner.moments * processes, cpu_memory)):
                return count, offload
    return None


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
        chosen["inference.vllm"] = split_engine(
            fitted, 2 * len(gpus), memory, shape, lambda tried: len(gpus) // count_engine_gpus(tried.inference.vllm)
        ).inference.vllm
    fitted = replace_settings(fitted, chosen)
    sequences = {"inference.max_num_seqs": count_sequences(shape, fitted, memory)}
    fitted = replace_settings(fitted, {name: value for name, value in sequences.items() if name not in given})
    slots = {"inference.slots": 2 * fitted.inference.max_num_seqs}
    return replace_settings(fitted, {name: value for name, value in slots.items() if name not in given})


def split_engine(
    configuration: Configuration,
    gpus: int,
    memory: int,
    shape: ModelShape | None,
    count_workers: Callable[[Configuration], int],
) -> Configuration:
    """The configuration with tensor parallelism over the least GPUs, at most half of them, on which the model leaves a cache of
    `ENOUGH_TOKENS`, and over twice as many while all of them together then sample `WORTH_SPLITTING` times as fast; as it is if
    none do. ``count_workers``: engines that a configuration would have, 0 if the learner did not fit beside them."""
    if shape is None or not memory:
        return configuration
    best, fastest = configuration, -1.0
    for size in (1, 2, 4, 8):
        if size > max(gpus // 2, 1) or shape.kv_heads % size:
            break
        arguments = msgspec.json.encode({"tensor_parallel_size": size}).decode() if size > 1 else ""
        tried = replace_settings(configuration, {"inference.vllm": arguments})
        engine = plan_engine(shape, tried, memory)
        if engine.total > count_usable(memory) or size * engine.parts["cache"] < ENOUGH_TOKENS * shape.count_cached() * 2:
            continue
        rate = _estimate_rate(tried, count_workers(tried), memory, shape)
        if rate <= WORTH_SPLITTING * fastest:
            break
        best, fastest = tried, rate
    return best


def _estimate_rate(configuration: Configuration, workers: int, memory: int, shape: ModelShape) -> float:
    """Tokens per second that so many ``workers`` sample together, computed; 0 without any."""
    if not workers:
        return 0.0
    sequences = count_sequences(shape, configuration, memory)
    tried = replace_settings(configuration, {"inference.max_num_seqs": sequences, "inference.workers": workers})
    tried = replace_settings(tried, {"environment.slots": count_episodes(tried)})
    engine = plan_engine(shape, tried, memory)
    step = estimate_step(shape, tried, processes=0, engines=workers, engine=engine, device=Device())
    return step.tokens_per_second * workers * count_engine_gpus(tried.inference.vllm)


def _check_engine(configuration: Configuration) -> None:
    if not configuration.inference.python and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "this machine has GPUs and no vLLM: pip install 'fleetbus[vllm]', or name an interpreter that has it "
            "(--inference-python), or ask for --inference-engine torch, which is slower"
        )
