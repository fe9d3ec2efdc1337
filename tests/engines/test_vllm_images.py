"""A model that sees on a real vLLM engine, beside the torch sampler; `just test-vllm` makes the environment and runs this."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, RequestRefused
from tests.support.vllm_engine import CLOSE, MARKS, generate_all, open_sampler

pytestmark = MARKS

EPISODES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.vision_models import write_vision_model

    return write_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from fleetbus_workers.images.processing import ImageProcessor

    return ImageProcessor(folder)


@pytest.fixture(scope="module")
async def sampler(folder: Path, processor: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    async with open_sampler(folder, tmp_path_factory.mktemp("served"), processor=processor, slots=8) as made:
        yield made


@pytest.fixture(scope="module")
async def reference(folder: Path, processor: Any) -> AsyncIterator[Any]:
    from fleetbus_workers.inference.torch import TorchSampler

    made = TorchSampler(folder, slots=8, max_model_len=512, processor=processor)
    async with made.run():
        yield made


def requests(processor: Any) -> list[GenerationRequest]:
    """Greedy turns after two images; in one history the policy itself has said an image token."""
    from tests.support.vision_models import ask, make_picture, show

    found = []
    for episode in range(EPISODES):
        ids = list(range(40, 70))
        images = []
        for turn in range(2):
            images.append(show(processor, ids, make_picture(10 * episode + turn, (20 + 5 * episode, 16))))
            ids += [80 + episode, processor.image_token_id if episode == 1 else 81, 82]
        request = ask(ids, tuple(images), key=f"e{episode}", tokens=8)
        found.append(msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, temperature=0.0)))
    return found


def max_difference(found: list[Generation], expected: list[Generation]) -> float:
    assert [each.ids for each in found] == [each.ids for each in expected]
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one.logprobs, other.logprobs, strict=True)
    ]
    return max(abs(one - other) for one, other in pairs)


async def test_vllm_and_torch_see_the_same(sampler: Any, reference: Any, processor: Any) -> None:
    wanted = requests(processor)
    assert max_difference(await generate_all(sampler, wanted), await generate_all(reference, wanted)) < CLOSE


async def test_after_a_swap_images_are_seen_with_the_new_vision_tower(
    sampler: Any, reference: Any, processor: Any, folder: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    from fleetbus_workers.weights.file import write_weights

    wanted = requests(processor)
    before = await generate_all(sampler, wanted)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision_model" in name or "connector" in name:
                parameter += 0.3 * parameter.abs().mean() * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "moved")
    file = tmp_path / "1.safetensors"
    manifest = write_weights(file, load_file(tmp_path / "moved" / "model.safetensors"))
    policy = PolicyPublished(
        policy="default", version=1, lineage="l", step=1, uri=str(file), manifest=manifest, size_bytes=file.stat().st_size
    )
    await sampler.load(policy)
    await reference.load(policy)
    after = await generate_all(sampler, wanted)
    assert max_difference(after, await generate_all(reference, wanted)) < CLOSE
    assert [each.logprobs for each in after] != [each.logprobs for each in before]
    assert {span.version for each in after for span in each.versions} == {1}


async def test_what_vllm_makes_otherwise_is_refused(sampler: Any, processor: Any) -> None:
    (wanted, *_) = requests(processor)
    moved = msgspec.structs.replace(wanted.images[0], start=wanted.images[0].start + 1, stop=wanted.images[0].stop + 1)
    with pytest.raises(RequestRefused, match="vllm makes other tokens of image"):
        await sampler.generate(msgspec.structs.replace(wanted, images=(moved, wanted.images[1])))
    rubbish = msgspec.structs.replace(wanted.images[0], data=b"no picture")
    with pytest.raises(RequestRefused, match="cannot be read"):
        await sampler.generate(msgspec.structs.replace(wanted, images=(rubbish, wanted.images[1])))
