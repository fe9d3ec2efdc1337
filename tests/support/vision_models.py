"""Small models that see, pictures for them, and episodes with pictures played on the embedded engine."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.utils import logging as transformers_logging

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.starter.vision_starter import CHAT_TEMPLATE, IMAGE, build_tokenizer, build_vision_starter

FAMILIES = ("idefics3", "llava")

Opened = Callable[[str], tuple[Path, ImageProcessor]]
"""A model folder of a family, and its processor."""


def open_families(new_folder: Callable[[str], Path]) -> Opened:
    """Each family is written once, into a folder of its own."""

    @cache
    def open_family(family: str) -> tuple[Path, ImageProcessor]:
        folder = write_vision_model(new_folder(family), family)
        return folder, ImageProcessor(folder)

    return open_family


def write_vision_model(folder: Path, family: str = "idefics3") -> Path:
    """A model that sees, with random weights."""
    torch.set_num_threads(1)
    if family == "idefics3":
        build_vision_starter(folder, steps=0)
        return folder
    transformers_logging.disable_progress_bar()
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    text = Qwen3Config(
        vocab_size=336, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            vision_feature_layer=-1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    side = {"height": 32, "width": 32}
    LlavaProcessor(
        CLIPImageProcessorPil(size=side, crop_size=side), tokenizer, patch_size=8, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_picture(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    """Noise, as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def hash_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def show(processor: ImageProcessor, ids: list[int], data: bytes) -> PlacedImage:
    """Append a picture to a history."""
    seen = processor.see(hash_name(data), data)
    start = len(ids)
    ids += seen.ids
    return PlacedImage(object=seen.name, start=start, stop=len(ids), data=data)


def ask(
    ids: list[int], images: tuple[PlacedImage, ...], *, key: str = "e", seed: int = 0, tokens: int = 6
) -> GenerationRequest:
    return GenerationRequest(
        cache_key=key, ids=list(ids), sampling=SamplingSettings(temperature=0.7), stop_ids=frozenset({2}), max_tokens=tokens,
        seed=seed, images=images,
    )  # fmt: skip


async def play(sampler: TorchSampler, processor: ImageProcessor, episode: int, turns: int = 3) -> TrainingSequence:
    """An episode with a picture per turn; those of even episodes begin with the same one."""
    ids, mask, logprobs = list(range(40, 70)), [False] * 30, [0.0] * 30
    images: list[PlacedImage] = []
    for turn in range(turns):
        before = len(ids)
        ids += [50 + turn]
        images.append(show(processor, ids, make_picture(turn if episode % 2 == 0 and turn == 0 else 100 * episode + turn)))
        ids += [7, 8, 9 + episode]
        mask += [False] * (len(ids) - before)
        logprobs += [0.0] * (len(ids) - before)
        generation = await sampler.generate(ask(ids, tuple(images), key=f"e{episode}", seed=10 * episode + turn))
        ids += generation.ids
        mask += [True] * len(generation.ids)
        logprobs += generation.logprobs
    sampled = np.array(mask)
    return TrainingSequence(
        episode_id=f"e{episode}",
        group_id="g",
        ids=np.array(ids, np.int32),
        loss_mask=sampled,
        logprobs=np.array(logprobs, np.float32),
        advantages=np.where(sampled, (-1.0) ** episode, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperature=0.7,
        images=tuple(images),
    )
