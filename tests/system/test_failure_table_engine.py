"""A real engine under failure: weights that are corrupt, of the wrong shape or not finite change nothing; another worker that
takes over an episode computes the very same tokens and log-probabilities from the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.config.settings import InferenceSettings
from fleetbus_schemas import Action, PolicyPublished, SamplingSettings, TensorEntry
from fleetbus_schemas.tokens import unpack_ids, unpack_logprobs
from fleetbus_workers.environment.adapters.warehouse.tasks import build_warehouse_task
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.starter.build import find_starter_folder
from fleetbus_workers.weights.file import write_weights
from tests.support.deployment_member import Member
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment
from tests.support.tool_calls import ConstantGrader

pytestmark = pytest.mark.integration

Tensors = dict[str, torch.Tensor]
SAMPLING = SamplingSettings(seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    model = AutoModelForCausalLM.from_pretrained(find_starter_folder(), dtype=torch.float32, local_files_only=True)
    return dict(model.state_dict())


def engine(fleet: SmallDeployment, name: str) -> Member:
    sampler = TorchSampler(find_starter_folder(), slots=4, max_model_len=1024)
    return fleet.inference(name, sampler=sampler, template=ChatTemplate(find_starter_folder()))


# Weights


def published(file: Path, manifest: tuple[TensorEntry, ...], version: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default",
        version=version,
        lineage="l1",
        step=version,
        uri=file.as_uri(),
        manifest=manifest,
        size_bytes=file.stat().st_size if file.exists() else 0,
    )


def first_name(tensors: Tensors) -> str:
    return next(name for name, tensor in tensors.items() if tensor.ndim == 2)


def corrupt(file: Path, tensors: Tensors) -> tuple[TensorEntry, ...]:
    manifest = write_weights(file, tensors)
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x40
    file.write_bytes(content)
    return manifest


def cut_short(file: Path, tensors: Tensors) -> tuple[TensorEntry, ...]:
    manifest = write_weights(file, tensors)
    file.write_bytes(file.read_bytes()[:-100])
    return manifest


def of_the_wrong_shape(file: Path, tensors: Tensors) -> tuple[TensorEntry, ...]:
    name = first_name(tensors)
    return write_weights(file, tensors | {name: tensors[name][:-1].clone()})


def not_finite(file: Path, tensors: Tensors) -> tuple[TensorEntry, ...]:
    name = first_name(tensors)
    changed = tensors[name].clone()
    changed[0, 0] = float("nan")
    return write_weights(file, tensors | {name: changed})


def missing(file: Path, tensors: Tensors) -> tuple[TensorEntry, ...]:
    manifest = write_weights(file, tensors)
    file.unlink()
    return manifest


Spoil = Callable[[Path, Tensors], tuple[TensorEntry, ...]]
BAD: tuple[Spoil, ...] = (
    corrupt,
    cut_short,
    of_the_wrong_shape,
    not_finite,
    missing,
)


async def test_bad_weights_change_nothing_until_good_ones_come(tensors: Tensors, tmp_path: Path) -> None:
    subject = "fb.small.policy.default"
    good = tmp_path / "good.safetensors"
    manifest = write_weights(good, tensors)
    async with small_deployment(build_configuration(inference=InferenceSettings(slots=4)), published=False) as fleet:
        with anyio.fail_after(45):
            worker = engine(fleet, "inference-0")
            fleet.environment("environment-0")
            await fleet.stored(subject, published(good, manifest, 1))
            await fleet.until(lambda: worker.name in fleet.beats and fleet.beats[worker.name].policy_version == 1)
            for number, spoil in enumerate(BAD, start=2):
                file = tmp_path / f"{spoil.__name__}.safetensors"
                await fleet.stored(subject, published(file, spoil(file, tensors), number))
            await fleet.request("between", sampling=SAMPLING)
            assert (await fleet.result("between")).policy_versions == (1,)
            await fleet.until(lambda: fleet.beats[worker.name].counters.get("weights_rejected", 0) >= len(BAD))
            assert fleet.beats[worker.name].policy_version == 1
            await fleet.stored(subject, published(good, manifest, 20))
            await fleet.until(lambda: fleet.beats[worker.name].policy_version == 20)
            await fleet.request("after", sampling=SAMPLING)
            assert (await fleet.result("after")).policy_versions == (20,)


# Taking over


async def play_episode(tensors: Tensors, folder: Path, *, engines: int) -> list[Action]:
    """The Actions of one episode in turn order. Of two engines, the one that answers first is killed after its answer."""
    file = folder / "weights.safetensors"
    manifest = write_weights(file, tensors)
    factory = build_environment_factory("warehouse", verifier=ConstantGrader())
    settings = build_configuration(inference=InferenceSettings(slots=4))
    with anyio.fail_after(45):
        async with factory.run(), small_deployment(settings, published=False) as fleet:
            await fleet.stored(fleet.subjects.policy("default"), published(file, manifest, 1))
            fleet.environment("environment-0", make=factory)
            for index in range(engines):
                engine(fleet, f"inference-{index}")
            await fleet.request(task=build_warehouse_task(11), sampling=SAMPLING, max_turns=4)
            if engines > 1:
                async with fleet.bus.read([fleet.subjects.actions()]) as reader:
                    await reader.receive()
                fleet.members[(await fleet.actions())[0].worker].kill()
            assert (await fleet.result()).attempts == 1
            return sorted(await fleet.actions(), key=lambda action: action.turn)


async def test_an_engine_that_takes_over_makes_the_same_tokens_and_log_probabilities(tensors: Tensors, tmp_path: Path) -> None:
    undisturbed = await play_episode(tensors, tmp_path, engines=1)
    handed_over = await play_episode(tensors, tmp_path, engines=2)
    assert len(undisturbed) >= 2
    assert len({action.worker for action in handed_over}) == 2, "nobody took over"
    assert len(handed_over) == len(undisturbed)
    for one, other in zip(undisturbed, handed_over, strict=True):
        assert unpack_ids(other.prompt_delta) == unpack_ids(one.prompt_delta)
        assert unpack_ids(other.sampled) == unpack_ids(one.sampled)
        assert unpack_logprobs(other.logprobs) == pytest.approx(unpack_logprobs(one.logprobs), abs=1e-5)
        assert other.history_hash == one.history_hash
