"""Every engine that samples a policy, one row each: the packages that it imports, and what it can do.

``inference.engine`` takes these names. Checks, replays and evaluations ask a row what an engine can do. The engine itself is
``open_engine(context)`` in the module of its name in `fleetbus_workers.inference`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from fleetbus.config.settings import InferenceSettings

_NO_LIMIT = 1 << 31

EngineName = Literal["torch", "vllm", "openai", "tinker", "chat"]


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. It imports ``packages``, which any of ``extras`` brings. ``is_local``: it computes from a model folder on
    the worker's own machine and calls nobody. It ``takes_images``, and ``takes_adapters`` as versions. One that does not
    ``needs_model`` has a template of its own."""

    packages: tuple[str, ...]
    extras: tuple[str, ...]
    is_local: bool = False
    takes_images: bool = False
    takes_adapters: bool = False
    needs_model: bool = True


ENGINES: dict[str, EngineKind] = {
    "torch": EngineKind(
        packages=("torch", "transformers"), extras=("torch",), is_local=True, takes_images=True, takes_adapters=True
    ),
    "vllm": EngineKind(
        packages=("vllm", "transformers"), extras=("vllm", "vllm-cpu"), is_local=True, takes_images=True, takes_adapters=True
    ),
    "openai": EngineKind(packages=("httpx", "transformers"), extras=("openai",)),
    "tinker": EngineKind(packages=("tinker", "transformers"), extras=("tinker",)),
    "chat": EngineKind(packages=("httpx",), extras=("openai",), needs_model=False),
}


def is_frozen(settings: InferenceSettings) -> bool:
    """True for a worker that serves a model as it is, or versions of another policy: its own publishes none."""
    return settings.frozen or bool(settings.versions_of) or not ENGINES[settings.engine].needs_model


def find_max_model_len(settings: InferenceSettings) -> int:
    """Most tokens that an engine takes; what has no model here refuses too many by itself."""
    return settings.max_model_len if ENGINES[settings.engine].needs_model else _NO_LIMIT


def list_engines(can: Callable[[EngineKind], bool]) -> tuple[str, ...]:
    """The names of the engines that ``can``, in the order of the table."""
    return tuple(name for name, kind in ENGINES.items() if can(kind))
