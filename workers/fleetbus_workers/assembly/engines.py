"""The engine that the configuration names, opened for as long as a worker runs. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import anyio.to_thread

from fleetbus.config.engines import ENGINES
from fleetbus.config.run_folder import run_folder
from fleetbus.errors import UserError
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.images.reader import image_reader
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.chat_transcript import ChatTranscript
from fleetbus_workers.inference.engine_context import EngineContext

if TYPE_CHECKING:
    from fleetbus.bus.base import LogBus
    from fleetbus.config.settings import Configuration, InferenceSettings
    from fleetbus_workers.images.processing import ImageProcessor
    from fleetbus_workers.inference.base import ImageSource, Sampler, Template


def check_packages(engine: str) -> None:
    """Raise `UserError` naming the extra if a package of an engine is not installed; nothing is imported."""
    missing = [package for package in ENGINES[engine].packages if importlib.util.find_spec(package) is None]
    if missing:
        extra = "]' or 'fleetbus[".join(ENGINES[engine].extras)
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'fleetbus[{extra}]'"
        )


def find_scratch_folder(configuration: Configuration, worker: str) -> Path:
    """The folder in which a worker keeps the weights that its engine reads; the run's folder may be mounted read-only."""
    folder = configuration.inference.scratch
    base = Path(folder) / configuration.run.name if folder else run_folder(configuration.run).weights
    return (base / f".{worker}").absolute()


T = TypeVar("T")

_LOADING = threading.Lock()


@asynccontextmanager
async def launch_engine(configuration: Configuration, worker: str) -> AsyncIterator[tuple[Sampler, Template]]:
    """The sampler, ready to be run, and the model's template. Cancelled while it only reads, it does not wait for its thread.
    Raises `UserError`, or `ModuleNotFoundError` for an extra."""
    settings = configuration.inference
    check_packages(settings.engine)
    kind = ENGINES[settings.engine]
    folder = find_model_folder(configuration.run) if kind.needs_model else None
    processor: ImageProcessor | None = None
    if folder is not None and configuration.environment.images and kind.takes_images:
        processor = await load_alone(_load_image_processor, folder)
    template = await load_alone(_load_template, folder, settings, processor) if folder is not None else ChatTranscript()
    served = find_scratch_folder(configuration, worker) / "served"
    context = EngineContext(
        configuration=configuration,
        folder=folder or served,
        served=served,
        template=cast("ChatTemplate", template),
        processor=processor,
    )
    module = await load_alone(importlib.import_module, f"fleetbus_workers.inference.{settings.engine}")
    async with module.open_engine(context) as sampler:
        yield sampler, template


async def load_alone(function: Callable[..., T], *arguments: object) -> T:
    """Call it in a thread while no other engine of the process loads; cancelled, it does not wait for the call. Packages that
    import their parts when those are first named, as transformers does, fail if two threads are the first."""

    def call() -> T:
        with _LOADING:
            return function(*arguments)

    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


def build_image_source(template: Template, bus: LogBus, run: str) -> ImageSource | None:
    """The source of a run's images for the engine that the template belongs to; None if it reads text only."""
    processor: ImageProcessor | None = getattr(template, "processor", None)
    if processor is None:
        return None
    from fleetbus_workers.inference.image_prompts import ImagePrompts

    return ImagePrompts(processor, image_reader(bus, run))


def _load_image_processor(folder: Path) -> ImageProcessor:
    try:
        from fleetbus_workers.images.processing import ImageProcessor
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed, and images need it: pip install 'fleetbus[vision]'") from error
    return ImageProcessor(folder)


def _load_template(folder: Path, settings: InferenceSettings, processor: ImageProcessor | None) -> ChatTemplate:
    thinking = {"auto": None, "on": True, "off": False}[settings.thinking]
    if processor is not None:
        from fleetbus_workers.inference.image_template import ImageTemplate

        return ImageTemplate(folder, processor, reasoning=settings.reasoning, thinking=thinking)
    return ChatTemplate(folder, reasoning=settings.reasoning, thinking=thinking)
