"""Vision-language models: the generic runner with image embeddings in place of image tokens.

The engine knows nothing of images: it compares, keeps and copies coded ids (`fleetbus_workers.images.embedding`), in which
every image
differs from every other. What an image's embeddings are is computed once per version of the weights and kept within a bound.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from fleetbus.errors import UserError
from fleetbus_workers.images.embedding import (
    compute_embeddings,
    compute_image_features,
    compute_image_key,
    encode_image_ids,
    list_image_keys,
)
from fleetbus_workers.images.model_check import check_image_model
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor, ProcessedImage
from fleetbus_workers.images.reader import ImageFailed
from fleetbus_workers.inference.base import RequestRefused
from fleetbus_workers.inference.torch.batch import PrefillTokens
from fleetbus_workers.inference.torch.generic import GenericRunner
from fleetbus_workers.inference.torch.kv_cache import Ids

CACHE_BYTES = 256 << 20
"""Embeddings of images that are kept between steps."""

MAX_CONCURRENT_IMAGES = 8


class ImageEncoder:
    """Encodes the images of requests as the model takes them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._room = anyio.CapacityLimiter(MAX_CONCURRENT_IMAGES)

    async def encode_images(self, ids: Ids, images: Sequence[PlacedImage]) -> tuple[Ids, tuple[ProcessedImage, ...]]:
        """``ids`` with images inserted into them, and those images. Raises `RequestRefused`."""
        try:
            seen = [await self._process_image(image) for image in images]
            return encode_image_ids(ids, list(zip(images, seen, strict=True))), tuple(seen)
        except ImageFailed as error:
            raise RequestRefused(str(error)) from error

    async def _process_image(self, image: PlacedImage) -> ProcessedImage:
        if (known := self.processor.look_up(image.object)) is not None:
            return known
        return await anyio.to_thread.run_sync(self.processor.see, image.object, image.data, limiter=self._room)


class VisionRunner(GenericRunner):
    """`Runner` for a model that `check_image_model` has tried."""

    def __init__(self, model: Any, *, slots: int, max_model_len: int) -> None:
        super().__init__(model, slots=slots, max_model_len=max_model_len)
        self._cached: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._current: dict[int, torch.Tensor] = {}

    def adopt(self, prepared: Mapping[str, torch.Tensor]) -> None:
        super().adopt(prepared)
        self._cached.clear()
        self._bytes = 0

    def _prefill(self, prefills: tuple[PrefillTokens, ...]) -> None:
        self._current = self._compute_embeddings(prefills)
        super()._prefill(prefills)
        self._current = {}

    def _build_inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return (
            {"inputs_embeds": compute_embeddings(self.model, tokens, self._current)}
            if self._current
            else super()._build_inputs(tokens)
        )

    def _compute_embeddings(self, prefills: tuple[PrefillTokens, ...]) -> dict[int, torch.Tensor]:
        """Those of every image in ``prefills``, by `compute_image_key`; what is not kept is computed now."""
        wanted = list_image_keys(prefill.ids for prefill in prefills)
        found = {key: self._cached[key] for key in wanted if key in self._cached}
        unknown = {compute_image_key(seen.name): seen for prefill in prefills for seen in prefill.images}
        computed = compute_image_features(self.model, [unknown[key] for key in sorted(wanted - set(found))])
        for key in found:
            self._cached.move_to_end(key)
        for key, embeddings in computed.items():
            self._cached[key] = embeddings
            self._bytes += embeddings.nbytes
        while self._bytes > CACHE_BYTES and self._cached:
            self._bytes -= self._cached.popitem(last=False)[1].nbytes
        return found | computed


def open_model(folder: Path, device: str, dtype: torch.dtype, processor: ImageProcessor) -> Any:
    """The image-text model of a folder, tried with two images. Raises `UserError`."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no image-text model can be loaded: {str(error).splitlines()[0]}") from error
    model = model.to(device).eval().requires_grad_(False)
    check_image_model(model, processor, folder)
    return model
