"""Builds a small vision-language model from random weights: Idefics3 with a tiny vision tower, imitating a noisy expert.

It answers the questions of the environment `colours` with a colour, hardly more often the right one than by chance: looking is
left to training. Blocking, on the CPU, half a minute; no download.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils import logging as transformers_logging

from fleetbus_workers.environment.adapters.colours import COLOURS, PLACES, SIZE, draw
from fleetbus_workers.images.embedding import compute_embeddings, compute_image_features, encode_image_ids
from fleetbus_workers.images.processing import ImageProcessor, ProcessedImage, expand_image_tokens
from fleetbus_workers.starter.tokenizer import PAD, TURN_END, TURN_START

IMAGE = "<image>"
AROUND_IMAGES = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Further tokens that the model's processor knows by name."""

PATCH = 8
STEPS = 120
EXPERT_ACCURACY = 0.3
"""Probability that the expert names the right colour; otherwise it names any colour."""
BATCH_SIZE = 32
LEARNING_RATE = 2e-3

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PROMPT = f"{TURN_START}user\n{IMAGE} Which colour?{TURN_END}\n{TURN_START}assistant\n"


class VisionStarterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result: parameters and tokens of the model."""

    parameters: int
    vocabulary: int


def build_vision_starter(
    folder: Path, *, seed: int = 0, steps: int = STEPS, report: Callable[[str], None] = lambda line: None
) -> VisionStarterReport:
    """Write a model folder that `from_pretrained` loads; on one thread. The same seed gives the same files on the same machine.
    Raises `OSError` when the folder cannot be written."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    _build_processor(tokenizer).save_pretrained(folder)
    model.config.save_pretrained(folder)
    _train_answering(model, tokenizer, ImageProcessor(folder), seed=seed, steps=steps, report=report)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    return VisionStarterReport(parameters=sum(parameter.numel() for parameter in model.parameters()), vocabulary=len(tokenizer))


def build_tokenizer() -> Any:
    """Byte-level BPE in which the words of the environment `colours` are single tokens."""
    words = " ".join([*COLOURS, *PLACES])
    texts = [f"{TURN_START}user\n{IMAGE} Which colour? Where is it?{TURN_END}\n{TURN_START}assistant\n{words}\n{words}"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[PAD, TURN_START, TURN_END, IMAGE, *AROUND_IMAGES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts + [f"{word}\n" for word in words.split() for _ in range(9)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, IMAGE, *AROUND_IMAGES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """Idefics3 of a third of a million parameters with random weights; an image is 16 embeddings."""
    torch.manual_seed(seed)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    text = {
        "model_type": "llama",
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Idefics3ForConditionalGeneration(config).eval()


def _build_processor(tokenizer: Any) -> Any:
    side = {"longest_edge": SIZE}
    processor = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    return Idefics3Processor(processor, tokenizer, image_seq_len=(SIZE // PATCH) ** 2, chat_template=CHAT_TEMPLATE)


def _train_answering(
    model: Any, tokenizer: Any, processor: ImageProcessor, *, seed: int, steps: int, report: Callable[[str], None]
) -> None:
    """Maximise the likelihood of the noisy expert's answer: a colour, then the end of the turn."""
    choice = random.Random(seed)
    encode = tokenizer.backend_tokenizer.encode
    prompt_ids = encode(_PROMPT, add_special_tokens=False).ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        rows, seen = [], []
        for _ in range(BATCH_SIZE):
            colour = choice.choice(list(COLOURS))
            picture = draw(colour, choice.choice(list(PLACES)), choice.getrandbits(32))
            seen.append(processor.see(f"{choice.getrandbits(256):064x}", picture))
            ids, shown = expand_image_tokens(prompt_ids, processor.image_token_id, seen[-1:])
            said = colour if choice.random() < EXPERT_ACCURACY else choice.choice(list(COLOURS))
            answer = encode(said + TURN_END, add_special_tokens=False).ids
            rows.append(encode_image_ids(np.array([*ids, *answer]), [(shown[0], seen[-1])]))
        loss = _fit_once(model, optimizer, rows, seen, len(answer))
        if (step + 1) % 20 == 0:
            report(f"learning to answer: step {step + 1} of {steps}, loss {loss:.3f}")


def _fit_once(model: Any, optimizer: Any, rows: list[NDArray[np.int64]], seen: list[ProcessedImage], answer: int) -> float:
    """One step on ``rows`` of equal length, whose last ``answer`` ids are to be predicted."""
    ids = torch.from_numpy(np.stack(rows))
    given = compute_embeddings(model, ids[:, :-1], compute_image_features(model, seen))
    logits = model(inputs_embeds=given, use_cache=False, logits_to_keep=answer).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -answer:].flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()
