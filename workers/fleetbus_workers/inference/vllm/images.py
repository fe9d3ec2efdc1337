"""Prompts with images for vLLM: its own processor makes the pixels, the ids and their places stay those that were recorded.

vLLM expands one placeholder per image in a prompt by itself, and would look for placeholders among sampled tokens too. So it is
given a prompt of nothing but placeholders; what it makes of them is then put under the ids that the episode has.
"""

from dataclasses import replace
from typing import Any

import anyio.to_thread

from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor, open_image
from fleetbus_workers.images.reader import ImageFailed
from fleetbus_workers.inference.base import GenerationRequest, RequestRefused

CACHE_GIB = 0.25
"""Processed images that vLLM keeps, twice: beside the event loop, and in the engine's process."""


async def build_image_prompt(
    engine: Any, request: GenerationRequest, salt: str, processor: ImageProcessor
) -> dict[str, object]:
    """The prompt that `AsyncLLM.generate` takes. Images are named with ``salt``, so that embeddings under other weights are
    never taken for theirs. Raises `RequestRefused` if vLLM makes other tokens of an image than stand in the history."""
    from vllm import TokensPrompt

    images = await anyio.to_thread.run_sync(_decode_images, request.images)
    placeholders = TokensPrompt(
        prompt_token_ids=[processor.image_token_id] * len(images),
        multi_modal_data={"image": images},
        multi_modal_uuids={"image": [f"{salt}.{image.object}" for image in request.images]},
    )
    (rendered,) = await engine.renderer.render_cmpl_async([placeholders])
    ranges = rendered["mm_placeholders"]["image"]
    places = []
    for image, place in zip(request.images, ranges, strict=True):
        made = rendered["prompt_token_ids"][place.offset : place.offset + place.length]
        if list(made) != list(request.ids[image.start : image.stop]):
            raise RequestRefused(f"vllm makes other tokens of image {image.object} than the processor of the model's folder")
        places.append(replace(place, offset=image.start))
    return {
        **rendered,
        "prompt_token_ids": list(request.ids),
        "mm_placeholders": {"image": places},
        "cache_salt": salt,
    }


def _decode_images(images: tuple[PlacedImage, ...]) -> list[object]:
    try:
        return [open_image(image.object, image.data) for image in images]
    except ImageFailed as error:
        raise RequestRefused(str(error)) from error
