"""Images in prompts and in models: the ids of the model's own processor, and the embeddings of its own forward pass."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText, AutoProcessor

from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, Image, Text
from fleetbus_workers.images.embedding import compute_embeddings, compute_image_features, encode_image_ids
from fleetbus_workers.images.model_check import check_image_model
from fleetbus_workers.images.processing import ImageProcessor, expand_image_tokens
from fleetbus_workers.images.reader import ImageMismatch, ImageMissing, ImageReader, ImageUnreadable
from fleetbus_workers.inference.image_prompts import ImagePrompts
from fleetbus_workers.inference.image_template import ImageTemplate
from fleetbus_workers.starter.build import find_starter_folder
from tests.support.backends import asyncio_alone
from tests.support.bucket import Bucket
from tests.support.vision_models import FAMILIES, Opened, hash_name, make_picture, open_families, show

pytestmark = pytest.mark.timeout(300)

anyio_backend = asyncio_alone


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_families(tmp_path_factory.mktemp)


def said(*parts: str | bytes) -> ChatMessage:
    content = [Text(text=part) if isinstance(part, str) else Image(object=hash_name(part)) for part in parts]
    return ChatMessage(role="user", content=tuple(content))


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prompt_has_the_ids_that_the_processor_makes_of_the_whole(family: str, opened: Opened) -> None:
    folder, processor = opened(family)
    pictures = [make_picture(1), make_picture(2, (60, 33)), make_picture(1)]
    messages = [
        ChatMessage(role="system", content="Look closely."),
        said("Here: ", pictures[0], " and ", pictures[1]),
        said(pictures[2], "\nWhich?"),
    ]
    template = ImageTemplate(folder, processor)
    prompts = ImagePrompts(processor, ImageReader(Bucket({hash_name(data): data for data in pictures})))
    delta = await prompts.expand(template.encode_prompt(messages, []), messages)
    plain = [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else [
                {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": "image"} for part in message.content
            ],
        }
        for message in messages
    ]
    own = AutoProcessor.from_pretrained(folder, local_files_only=True)
    text = own.apply_chat_template(plain, add_generation_prompt=True)
    process_prompt = own(text=[text], images=[[Pillow.open(io.BytesIO(data)) for data in pictures]], add_special_tokens=False)
    assert delta.ids == process_prompt["input_ids"][0]
    assert [image.object for image in delta.images] == [hash_name(data) for data in pictures]
    for image, data in zip(delta.images, pictures, strict=True):
        assert tuple(delta.ids[image.start : image.stop]) == processor.see(hash_name(data), data).ids


async def test_later_turns_append_and_text_cannot_show_an_image(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    template = ImageTemplate(folder, processor)
    prompts = ImagePrompts(processor, ImageReader(Bucket({hash_name(make_picture(1)): make_picture(1)})))
    first = said("What is this?", make_picture(1))
    begun = await prompts.expand(template.encode_prompt([first], []), [first])
    second = ChatMessage(role="user", content="And <image> this? <fake_token_around_image>")
    delta = await prompts.expand(template.encode_continuation([template.turn_end], [second]), [second])
    assert processor.image_token_id in begun.ids
    assert processor.image_token_id not in delta.ids
    assert delta.images == ()
    assert "<\u200bimage>" in template.decode(delta.ids)


async def test_an_image_that_is_gone_or_is_none_is_told_apart(opened: Opened) -> None:
    folder, processor = opened("idefics3")
    template = ImageTemplate(folder, processor)
    rubbish = b"no picture"
    prompts = ImagePrompts(processor, ImageReader(Bucket({hash_name(rubbish): rubbish})))
    for data, error in ((b"never stored", ImageMissing), (rubbish, ImageUnreadable)):
        with pytest.raises(error):
            await prompts.expand(template.encode_prompt([said("See", data)], []), [said("See", data)])


def test_an_image_of_too_many_pixels_is_refused_before_it_is_unpacked(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.images.processing.MAX_PIXELS", 100)
    with pytest.raises(ImageUnreadable, match="20x16 pixels, more than 100"):
        opened("idefics3")[1].see("0" * 64, make_picture(7))


def test_what_is_made_of_images_is_kept_within_a_bound(opened: Opened) -> None:
    folder, _ = opened("idefics3")
    one = ImageProcessor(folder).see("0" * 64, make_picture(1)).size_bytes
    processor = ImageProcessor(folder, cache_bytes=2 * one)
    for seed in (1, 2, 1, 3):
        processor.see(hash_name(make_picture(seed)), make_picture(seed))
    assert [processor.look_up(hash_name(make_picture(seed))) is not None for seed in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_in_the_place_of_tokens_are_the_models_own_forward_pass(family: str, opened: Opened) -> None:
    folder, processor = opened(family)
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    check_image_model(model, processor, folder)
    pictures = [make_picture(3), make_picture(4, (31, 50))]
    ids = [9, 8, processor.image_token_id, 7, processor.image_token_id, 6, 5]
    seen = [processor.see(hash_name(data), data) for data in pictures]
    process_prompt, shown = expand_image_tokens(ids, processor.image_token_id, seen)
    codes = torch.from_numpy(encode_image_ids(np.array(process_prompt), list(zip(shown, seen, strict=True)))[None])
    given = {name: torch.cat([each.inputs[name] for each in seen]) for name in seen[0].inputs}
    if family == "idefics3":  # which counts images of one prompt in the second dimension
        given = {name: tensor.transpose(0, 1) for name, tensor in given.items()}
    with torch.no_grad():
        found = model(inputs_embeds=compute_embeddings(model, codes, compute_image_features(model, seen))).logits
        expected = model(input_ids=torch.tensor([process_prompt]), **given).logits
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_model_that_does_more_with_images_is_refused_by_name(opened: Opened) -> None:
    folder, processor = opened("llava")
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    plain = model.base_model.forward

    def moving(*given: Any, **named: Any) -> Any:
        if named.get("pixel_values") is not None:
            named["position_ids"] = torch.arange(named["input_ids"].shape[1])[None] // 2
        return plain(*given, **named)

    model.base_model.forward = moving
    with pytest.raises(UserError, match="LlavaForConditionalGeneration does more with images"):
        check_image_model(model, processor, folder)


def test_codes_tell_images_apart_and_leave_other_ids(opened: Opened) -> None:
    _, processor = opened("llava")
    rows = []
    for seed in (1, 2):
        ids = [11, 12]
        placed = show(processor, ids, make_picture(seed))
        ids.append(13)
        rows.append(encode_image_ids(np.array(ids), [(placed, processor.see(placed.object, placed.data))]))
    assert rows[0][[0, 1, -1]].tolist() == [11, 12, 13]
    assert (rows[0][2:-1] < 0).all()
    assert not set(rows[0][2:-1]) & set(rows[1][2:-1])


def test_an_image_in_the_place_of_other_tokens_is_a_mismatch(opened: Opened) -> None:
    _, processor = opened("llava")
    placed = show(processor, ids := [11], make_picture(1))
    with pytest.raises(ImageMismatch, match="engine and learner need the same model folder"):
        encode_image_ids(np.array(ids[:-1]), [(placed, processor.see(placed.object, placed.data))])


def test_a_folder_that_cannot_see_is_refused_in_one_line(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"this model reads text only: its config\.json has no vision_config"):
        ImageProcessor(find_starter_folder())
    folder, processor = opened("llava")
    blind = shutil.copytree(folder, tmp_path / "blind")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    (blind / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="does not write <image> for each image"):
        ImageTemplate(blind, processor)
    (blind / "processor_config.json").write_text(json.dumps({"processor_class": "NoSuchProcessor"}))
    with pytest.raises(UserError, match=str(blind)):
        ImageProcessor(blind)
