"""The profile of a run: settings by default for a model of yours on GPUs, or for the starter policy on a laptop. Pure.

`up`, roles by hand, compose, Kubernetes and `fleetbus plan` all take theirs from here, so that they are the same; what anybody
set stays. The learner records what it took in the log, with its lineage. What follows from the number and size of the GPUs of
one machine is in `fleetbus_workers.up.profile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fleetbus.config.settings import Configuration

TOKEN_BUDGET = 16_384
FULL_RATE = 1e-6
"""Learning rate of all weights of a pretrained model, as TRL, prime-rl and verl have it by default."""

ADAPTER_RATE = 1e-5
"""Of adapters: about ten times as much ("LoRA Without Regret", thinkingmachines.ai, 2025)."""

PROFILE: dict[str, Any] = {
    "inference.engine": "vllm",
    "inference.dtype": "bfloat16",
    "inference.max_num_seqs": 64,
    "inference.slots": 128,
    "trainer.device": "cuda",
    "trainer.precision": "bfloat16",
    "trainer.published_dtype": "bfloat16",
    "trainer.gradient_checkpointing": True,
    "trainer.token_budget": TOKEN_BUDGET,
    "learner.learning_rate": FULL_RATE,
    "learner.checkpoint_every": 20,
    "episode.max_tokens": 1024,
    "limits.action": 1800.0,
}

TABLES = {
    "learner": ("learner", "algorithm", "trainer", "episode", "limits"),
    "inference": ("inference", "limits"),
    "environment": ("environment", "limits"),
}
"""By role, the tables that it reads."""

FITTED = ("inference.max_model_len", "episode.max_episode_tokens")
"""Settings that follow the model (`fleetbus_workers.up.model_limits`)."""

OF_MACHINE = ("inference.max_num_seqs", "inference.slots")
"""Settings for which a machine with more or larger GPUs has others."""

OF_ENGINES = ("inference.dtype", "inference.max_num_seqs", "inference.slots")
"""Settings of vLLM alone."""


def apply_profile(configuration: Configuration, given: Mapping[str, str], *, has_gpus: bool) -> Configuration:
    """The configuration with the settings of its profile, which it names from now on; those in ``given`` stay. ``auto`` is a
    laptop's without GPUs, or a model of yours for engine and trainer of this project."""
    name = resolve_profile(configuration, has_gpus=has_gpus)
    wanted: dict[str, object] = {"run.profile": name}
    if name == "gpu":
        wanted |= {setting: value for setting, value in _iterate_profile(configuration, given) if setting not in given}
    return replace_settings(configuration, wanted)


def resolve_profile(configuration: Configuration, *, has_gpus: bool) -> str:
    """``gpu`` or ``laptop``."""
    if configuration.run.profile != "auto":
        return configuration.run.profile
    local = configuration.learner.trainer == "torch" and configuration.inference.engine in ("torch", "vllm")
    return "gpu" if has_gpus and configuration.run.model and local else "laptop"


def _iterate_profile(configuration: Configuration, given: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    values = PROFILE | ({"learner.learning_rate": ADAPTER_RATE} if configuration.trainer.lora_rank else {})
    on_cpu = "trainer.device" in given and configuration.trainer.device == "cpu"
    other_engine = "inference.engine" in given and configuration.inference.engine != "vllm"
    for name, value in values.items():
        if on_cpu and name.partition(".")[0] in ("trainer", "learner"):
            continue
        if not (other_engine and name in OF_ENGINES):
            yield name, value


def describe_profile(configuration: Configuration, role: str = "") -> str:
    """One line: the profile, and every setting that it decides as this process takes it, of the tables that ``role`` reads;
    empty: of all. The same wherever and however the role was started."""
    tables = TABLES.get(role, ())
    values = list_profile(configuration)
    shown = [
        f"{name} = {format_setting(value)}" for name, value in values.items() if not role or name.partition(".")[0] in tables
    ]
    return f"profile {configuration.run.profile}: {', '.join(shown)}"


def list_profile(configuration: Configuration) -> dict[str, bool | int | float | str]:
    """Every setting that a profile decides, by name, on whatever machine."""
    names = (name.partition(".") for name in sorted((*PROFILE, *FITTED)) if name not in OF_MACHINE)
    return {f"{table}.{key}": getattr(getattr(configuration, table), key) for table, _, key in names}


def replace_settings(configuration: Configuration, values: Mapping[str, object]) -> Configuration:
    """The configuration with settings by their names."""
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    changed = {table: msgspec.structs.replace(getattr(configuration, table), **keys) for table, keys in tables.items()}
    return msgspec.structs.replace(configuration, **changed)


def format_setting(value: object) -> str:
    """A value as a person would write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
