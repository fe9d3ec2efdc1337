"""Models that see: the generic runner with embeddings of images in the place of their tokens.

The engine knows nothing of images: it compares, keeps and copies coded ids (`fleetbus_workers.images.embedding`), in which
every image differs from every other. What an image's embeddings are is computed once per version of the weights and kept
within a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from fleetbus.errors import UserError
from fleetbus_workers.images.embedding import ImageMismatch, coded, embedded, features, image_key, shown_keys
from fleetbus_workers.images.placed import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor, Seen
from fleetbus_workers.images.reading import ImageFailed
from fleetbus_workers.images.trial import check_image_model
from fleetbus_workers.inference.base import RequestRefused
from fleetbus_workers.inference.torch.batch import Extra
from fleetbus_workers.inference.torch.generic import GenericRunner
from fleetbus_workers.inference.torch.kept import Ids

KEPT_BYTES = 256 << 20
"""Embeddings of images that are kept between steps."""

MAX_SEEN_AT_A_TIME = 8


class Eyes:
    """Images of requests as the model takes them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._room = anyio.CapacityLimiter(MAX_SEEN_AT_A_TIME)

    async def shown(self, ids: Ids, images: Sequence[PlacedImage]) -> tuple[Ids, tuple[Seen, ...]]:
        """``ids`` with images coded into them, and those images. Raises `RequestRefused`."""
        try:
            seen = [await self._seen(image) for image in images]
            return coded(ids, list(zip(images, seen, strict=True))), tuple(seen)
        except (ImageFailed, ImageMismatch) as error:
            raise RequestRefused(str(error)) from error

    async def _seen(self, image: PlacedImage) -> Seen:
        if (known := self.processor.known(image.object)) is not None:
            return known
        return await anyio.to_thread.run_sync(self.processor.see, image.object, image.data, limiter=self._room)


class SeeingRunner(GenericRunner):
    """`Runner` for a model that `check_image_model` has tried."""

    def __init__(self, model: Any, *, slots: int, max_length: int) -> None:
        super().__init__(model, slots=slots, max_length=max_length)
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._now: dict[int, torch.Tensor] = {}

    def adopt(self, prepared: Mapping[str, torch.Tensor]) -> None:
        super().adopt(prepared)
        self._kept.clear()
        self._bytes = 0

    def _prefill(self, extras: tuple[Extra, ...]) -> None:
        self._now = self._embeddings(extras)
        super()._prefill(extras)
        self._now = {}

    def _inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": embedded(self.model, tokens, self._now)} if self._now else super()._inputs(tokens)

    def _embeddings(self, extras: tuple[Extra, ...]) -> dict[int, torch.Tensor]:
        """Those of every image in ``extras``, by `image_key`; what is not kept is computed now."""
        wanted = shown_keys(extra.ids for extra in extras)
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        unknown = {image_key(seen.name): seen for extra in extras for seen in extra.images}
        made = features(self.model, [unknown[key] for key in sorted(wanted - set(found))])
        for key in found:
            self._kept.move_to_end(key)
        for key, embeddings in made.items():
            self._kept[key] = embeddings
            self._bytes += embeddings.nbytes
        while self._bytes > KEPT_BYTES and self._kept:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found | made


def open_model(folder: Path, device: str, dtype: torch.dtype, processor: ImageProcessor) -> Any:
    """The image-text model of a folder, tried with two images. Raises `UserError`."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no image-text model can be loaded: {str(error).splitlines()[0]}") from error
    model = model.to(device).eval().requires_grad_(False)
    check_image_model(model, processor, folder)
    return model
