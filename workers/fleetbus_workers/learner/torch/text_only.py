"""Text in training: what stands in the place of `fleetbus_workers.learner.torch.images` for a model that reads text only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetbus.errors import UserError
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import ImageMismatch
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.forward import Inputs, build_text_inputs

_REFUSED = "contains images, and this trainer reads text only: set environment.images = true for the learner"


class TextOnly:
    """No images."""

    def check_images(self, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        raise ImageMismatch(f"the episode {_REFUSED}")

    def encode_images(self, batch: Sequence[TrainingSequence]) -> tuple[list[NDArray[np.int32]], Inputs]:
        """The ids as they are. Raises `UserError` if a sequence shows images."""
        if any(sequence.images for sequence in batch):
            raise UserError(f"the batch {_REFUSED}")
        return [sequence.ids for sequence in batch], build_text_inputs
