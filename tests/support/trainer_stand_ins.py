"""Adapters of other trainers without those trainers: stand-ins take the place of what an adapter imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def load_adapter(monkeypatch: pytest.MonkeyPatch, name: str, modules: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """The adapter of this name in `fleetbus_workers.trainers`, for one test, with these members of these modules;
    packages above them are empty."""
    for module, members in modules.items():
        parts = module.split(".")
        for above in (".".join(parts[:end]) for end in range(1, len(parts))):
            if above not in modules:
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        stand_in = ModuleType(module)
        stand_in.__dict__.update(members)
        monkeypatch.setitem(sys.modules, module, stand_in)
    adapter = f"fleetbus_workers.trainers.{name}"
    monkeypatch.setitem(sys.modules, adapter, ModuleType(adapter))  # for monkeypatch to take it away again
    del sys.modules[adapter]
    return importlib.import_module(adapter)
