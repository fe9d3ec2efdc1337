"""Defines what an engine is opened with: each engine's module has ``open_engine(context)``, an async context manager.

It gives a `Sampler` that is ready to be run, and releases at the end what that holds. It raises `UserError` for what the user
has to change. Above it is the assembly, which imports the module of the engine that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.images.processing import ImageProcessor
    from fleetbus_workers.inference.chat_template import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """``folder`` holds the run's first model, ``served`` is where an engine writes the versions that it reads as folders.
    ``processor`` is there where images are shown to an engine that takes them. An engine that needs no model
    reads neither folder nor template."""

    configuration: Configuration
    folder: Path
    served: Path
    template: ChatTemplate
    processor: ImageProcessor | None = None
