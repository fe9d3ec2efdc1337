"""Images in the place of tokens: ids that say which embedding of which image stands somewhere, and those embeddings.

In a history that shows images, the ids of image tokens are replaced by negative ones, made of the image's hash and the number
of the embedding. So what compares ids - prefixes computed once, keys and values that are kept - distinguishes images
without knowing of them. Models see embeddings only; a text model never meets a negative id.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_workers.images.processing import ProcessedImage
from fleetbus_workers.images.reader import ImageMismatch

NUMBER_BITS = 16
"""Bits of the number of an embedding within its image."""

HASH_BITS = 62 - NUMBER_BITS


class ImageSpan(Protocol):
    """The place of an image in a history: tokens ``[start, stop)``."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


def compute_image_key(name: str) -> int:
    """The number of an image: the first `HASH_BITS` of its SHA-256 (hex)."""
    return int(name[:16], 16) >> (64 - HASH_BITS)


def decode_image_keys(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of the images that negative ids stand for."""
    keys: NDArray[np.int64] = (-ids - 1) >> NUMBER_BITS
    return keys


def encode_image_ids(ids: NDArray[np.int64], images: Sequence[tuple[ImageSpan, ProcessedImage]]) -> NDArray[np.int64]:
    """A copy of ``ids`` [T] with a negative id wherever an embedding stands. Raises `ImageMismatch` unless each image became
    exactly the ids in its place."""
    result = ids.copy()
    for placed, seen in images:
        found = ids[placed.start : placed.stop]
        if len(found) != len(seen.ids) or not np.array_equal(found, seen.ids):
            raise ImageMismatch(
                f"image {seen.name} is {len(seen.ids)} tokens here and {len(found)} in the history, or others: "
                "engine and learner need the same model folder"
            )
        codes = (compute_image_key(seen.name) << NUMBER_BITS) + np.arange(len(seen.places), dtype=np.int64)
        result[placed.start + seen.places] = -codes - 1
    return result


def compute_image_features(model: object, images: Sequence[ProcessedImage]) -> dict[int, torch.Tensor]:
    """Embeddings [n, hidden] of images by their number, with gradient if it is on. Images of one shape go in together."""
    alike: dict[tuple[object, ...], list[ProcessedImage]] = {}
    for seen in {each.name: each for each in images}.values():
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(seen.inputs.items()))
        alike.setdefault(shape, []).append(seen)
    found: dict[int, torch.Tensor] = {}
    for group in alike.values():
        inputs = {name: torch.cat([seen.inputs[name] for seen in group]) for name in group[0].inputs}
        embeddings = _image_features(model, inputs)
        counts = [len(seen.places) for seen in group]
        if len(embeddings) != sum(counts):
            raise ImageMismatch(f"{type(model).__name__} makes {len(embeddings)} embeddings where {sum(counts)} tokens stand")
        found |= {compute_image_key(seen.name): part for seen, part in zip(group, torch.split(embeddings, counts), strict=True)}
    return found


def compute_embeddings(model: Any, ids: torch.Tensor, found: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Embeddings [..., hidden] of coded ids int64 [...]; ``found`` has those of all images in them, by `compute_image_key`."""
    embeddings: torch.Tensor = model.get_input_embeddings()(ids.clamp(min=0))
    places = ids < 0
    if not bool(places.any()):
        return embeddings
    codes = -ids[places] - 1
    keys, numbers = codes >> NUMBER_BITS, codes & ((1 << NUMBER_BITS) - 1)
    present = torch.unique(keys).tolist()
    starts = np.cumsum([0, *(len(found[key]) for key in present)])[:-1]
    offsets = torch.zeros_like(keys)
    for key, start in zip(present, starts.tolist(), strict=True):
        offsets[keys == key] = start
    rows = torch.cat([found[key] for key in present])[offsets + numbers]
    return embeddings.masked_scatter(places[..., None], rows.to(embeddings))


def list_image_keys(ids: Iterable[NDArray[np.int64]]) -> set[int]:
    """The numbers of all images in coded ids."""
    return {int(key) for each in ids for key in np.unique(decode_image_keys(each[each < 0]))}


def _image_features(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All embeddings [n, hidden], image after image."""
    # What a model's own method passes on is named by that of the model inside of it only.
    names = {name for each in (model, model.base_model) for name in inspect.signature(each.get_image_features).parameters}
    known = {name: value.to(model.device) for name, value in inputs.items() if name in names}
    known = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in known.items()}
    made = model.get_image_features(**known, return_dict=True).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in made])
