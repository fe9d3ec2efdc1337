"""Images in training: image embeddings with gradient in place of the image tokens.

Ids are coded as in the engine (`fleetbus_workers.images.embedding`), so that a prefix is shared only where its images are the
same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
from fleetbus_workers.images.processing import ImageProcessor
from fleetbus_workers.images.reader import ImageFailed
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.forward import Inputs


class TrainingImages:
    """The images of batches for one model. Raises `UserError` if the model cannot be shown images here."""

    def __init__(self, folder: Path, model: object, *, processes: int) -> None:
        if processes > 1:
            raise UserError(
                "training on images supports one process only: start the learner without torchrun, or leave out images"
            )
        self._processor = ImageProcessor(folder)
        check_image_model(model, self._processor, folder)

    def check_images(self, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Raise `ImageFailed` unless each of ``images`` becomes the ids that stand in its place."""
        encode_image_ids(ids.astype(np.int64), [(image, self._processor.see(image.object, image.data)) for image in images])

    def encode_images(self, batch: Sequence[TrainingSequence]) -> tuple[list[NDArray[np.int64]], Inputs]:
        """Coded ids of every sequence, and what makes inputs of them. Raises `UserError` if an image is not what the engine
        saw."""
        try:
            seen = {image.object: self._processor.see(image.object, image.data) for each in batch for image in each.images}
            ids = [
                encode_image_ids(each.ids.astype(np.int64), [(image, seen[image.object]) for image in each.images])
                for each in batch
            ]
        except ImageFailed as error:
            raise UserError(str(error)) from error
        by_key = {compute_image_key(name): each for name, each in seen.items()}

        def inputs(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            wanted = list_image_keys([ids.cpu().numpy()])
            if not wanted:
                return {"input_ids": ids}
            return {
                "inputs_embeds": compute_embeddings(
                    model, ids, compute_image_features(model, [by_key[key] for key in sorted(wanted)])
                )
            }

        return ids, inputs
