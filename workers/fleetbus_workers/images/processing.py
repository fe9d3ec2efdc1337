"""An image as a model takes it: the ids that stand for it in a prompt, and the arguments of its vision tower.

Both come from the processor of the model's own folder, one image at a time, so that they depend on the image alone and can be
kept by its hash. Everything here blocks: callers use a thread.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_schemas import ShownImage
from fleetbus_workers.images.image_formats import IMAGE_FORMATS
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.images.reader import ImageUnreadable

MAX_PIXELS = 64_000_000
"""Larger images are refused: a small file may unpack to any size."""

CACHE_BYTES = 256 << 20

_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})


@dataclass(frozen=True)
class ProcessedImage:
    """An image as the model takes it. ``ids`` stand for it in a prompt; those at ``places`` (int64 [n], counted within
    ``ids``) are replaced by its n embeddings. ``inputs`` are the arguments of the model's ``get_image_features``."""

    name: str
    ids: tuple[int, ...]
    places: NDArray[np.int64]
    inputs: dict[str, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values()) + 8 * len(self.ids)


def expand_image_tokens(
    ids: Sequence[int], image_token_id: int, images: Sequence[ProcessedImage]
) -> tuple[list[int], list[ShownImage]]:
    """A prompt with each image token replaced by the ids that stand for its image, and where they stand, in order.

    Raises `ValueError` if the prompt does not have one image token per image.
    """
    if (count := sum(each == image_token_id for each in ids)) != len(images):
        raise ValueError(f"the chat template shows {count} of {len(images)} images")
    result: list[int] = []
    shown: list[ShownImage] = []
    remaining = iter(images)
    for each in ids:
        if each != image_token_id:
            result.append(each)
            continue
        seen = next(remaining)
        shown.append(ShownImage(object=seen.name, start=len(result), stop=len(result) + len(seen.ids)))
        result += seen.ids
    return result, shown


class ImageProcessor:
    """The processor of a model folder. Keeps what it made of images, the least recently used dropped beyond ``cache_bytes``.

    Raises `UserError` if the folder has no processor that can be used here.
    """

    def __init__(self, folder: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._folder = folder
        self._processor = _open_processor(folder)
        self.image_token: str = str(getattr(self._processor, "image_token", "") or "")
        self.image_token_id = _image_token_id(self._processor, folder)
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._cache_bytes, self._bytes = cache_bytes, 0
        self._lock = threading.Lock()

    def look_up(self, name: str) -> ProcessedImage | None:
        """Look up what was made of an image before, if it is still kept; never blocks for long."""
        return self._cache.get(name)

    def see(self, name: str, data: bytes) -> ProcessedImage:
        """The image of these bytes (a file of any format that Pillow reads). Raises `ImageUnreadable`."""
        with self._lock:
            if (seen := self._cache.get(name)) is not None:
                self._cache.move_to_end(name)
                return seen
            seen = self._process_image(name, open_image(name, data))
            self._cache[name] = seen
            self._bytes += seen.size_bytes
            while self._bytes > self._cache_bytes and self._cache:
                self._bytes -= self._cache.popitem(last=False)[1].size_bytes
            return seen

    def process_prompt(self, text: str, images: list[Any]) -> dict[str, torch.Tensor]:
        """Process a whole prompt with its images, as a model is given it outside of here."""
        return dict(self._processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt"))

    def _process_image(self, name: str, image: Any) -> ProcessedImage:
        try:
            processed = self.process_prompt(self.image_token, [image])
        except Exception as error:  # a model's own code, which may fail in any way on what it is shown
            raise ImageUnreadable(f"image {name}: the model's processor fails: {_first_line(error)}") from error
        ids = processed["input_ids"][0].tolist()
        inputs = {key: value for key, value in processed.items() if key not in _TEXT_INPUTS and isinstance(value, torch.Tensor)}
        return ProcessedImage(name, tuple(ids), np.flatnonzero(np.array(ids) == self.image_token_id), inputs)


def open_image(name: str, data: bytes) -> Any:
    """A Pillow image, RGB. Raises `ImageUnreadable`."""
    try:
        with Pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageUnreadable(f"image {name} has {image.width}x{image.height} pixels, more than {MAX_PIXELS}")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ImageUnreadable(f"image {name} cannot be read: {_first_line(error)}") from error


def _open_processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    if not has_vision(folder):
        raise UserError(f"{folder}: this model reads text only: its config.json has no vision_config")
    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: its image processor cannot be loaded: {_first_line(error)}") from error
    if getattr(processor, "image_processor", None) is None or not getattr(processor, "image_token", None):
        raise UserError(
            f"{folder}: {type(processor).__name__} does not process images within text; check the folder for missing files"
        )
    return processor


def _image_token_id(processor: Any, folder: Path) -> int:
    found = getattr(processor, "image_token_id", None)
    if found is None:
        found = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if not isinstance(found, int):
        raise UserError(f"{folder}: the tokenizer has no token {processor.image_token}")
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
