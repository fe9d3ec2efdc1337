"""Checks that a model takes images as embeddings in the place of tokens and as nothing else: tried, not guessed by name.

LLaVA, Idefics3 and their like do. Models that also move positions (Qwen-VL), feed later layers (DeepStack) or let the tokens of
an image see each other (Gemma 3) would compute something else here than outside, so they are refused by name beforehand.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_workers.images.embedding import compute_embeddings, compute_image_features, encode_image_ids
from fleetbus_workers.images.processing import ImageProcessor, expand_image_tokens
from fleetbus_workers.images.reader import ImageMismatch

SIZES = ((40, 28), (24, 36))
"""Width and height of the two images of the trial."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of logits, relative to the largest of them."""


def check_image_model(model: Any, processor: ImageProcessor, folder: Path) -> None:
    """Raise `UserError` unless the model's own forward pass over a prompt with two images is what is computed here."""
    pictures = [_noise(index, size) for index, size in enumerate(SIZES)]
    seen = [processor.see(hashlib.sha256(data).hexdigest(), data) for data in pictures]
    text = processor.image_token * 2
    process_prompt = processor.process_prompt(text, [Pillow.open(io.BytesIO(data)) for data in pictures])
    own = process_prompt["input_ids"][0].tolist()
    ids, shown = expand_image_tokens([processor.image_token_id] * 2, processor.image_token_id, seen)
    if ids != own:
        raise UserError(f"{folder}: its processor makes different tokens of two images together than of each alone")
    with torch.no_grad():
        try:
            codes = encode_image_ids(np.array(ids, np.int64), list(zip(shown, seen, strict=True)))
            given = compute_embeddings(
                model, torch.from_numpy(codes[None]).to(model.device), compute_image_features(model, seen)
            )
        except (ImageMismatch, AttributeError, TypeError) as error:
            raise UserError(
                f"{folder}: {type(model).__name__} does not take images in place of {processor.image_token}: {error}"
            ) from error
        expected = model(
            **{name: value.to(model.device) for name, value in process_prompt.items()}, use_cache=False
        ).logits.float()
        found = model(inputs_embeds=given, use_cache=False).logits.float()
    difference = (found - expected).abs().max() / expected.abs().max()
    if not difference <= TOLERANCE.get(model.dtype, 1e-4):
        raise UserError(
            f"{folder}: {type(model).__name__} does more with images than replace tokens by their embeddings, which is all "
            "that is supported; choose a model such as LLaVA or Idefics3"
        )


def _noise(seed: int, size: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
