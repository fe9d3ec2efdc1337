"""Versions that are LoRA adapters alone (arXiv 2106.09685): megabytes where the merged model has gigabytes.

Tensors are named as in PEFT's files, which vLLM reads. Their scale is multiplied into the second factor, so that rank and alpha
are alike and a version needs no numbers beside its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.weights.file import WeightsRejected, read_weights

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIGURATION = "adapter_config.json"


def has_adapters(names: Iterable[str]) -> bool:
    """True if a version with tensors of these names holds adapters alone."""
    return any(name.endswith((DOWN, UP)) for name in names)


def check_adapters(what: str, found: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """By module of the model ``base`` (shapes by name) the rank of its adapter.

    Raises `WeightsRejected` naming the first tensor that is not half of a pair that fits a weight.
    """
    ranks = {}
    for name, shape in found.items():
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        down, up, weight = (found.get(PREFIX + module + DOWN), found.get(PREFIX + module + UP), base.get(f"{module}.weight"))
        if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)) or down is None or up is None or weight is None:
            raise WeightsRejected(f"{what}: {name} is no part of an adapter of this model")
        if len(shape) != 2 or len(down) != 2 or (up, down) != ((weight[0], down[0]), (down[0], weight[1])):
            raise WeightsRejected(f"{what}: {name} has shape {list(shape)}, and {module}.weight {list(weight)}")
        ranks[module] = down[0]
    return ranks


def merge_adapters(
    what: str, adapters: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of ``base`` with the adapters added to what they adapt, in its types. Raises `WeightsRejected`."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (adapters, base)]
    merged = dict(base)
    for module in check_adapters(what, *shapes):
        weight = base[f"{module}.weight"]
        delta = adapters[PREFIX + module + UP].float() @ adapters[PREFIX + module + DOWN].float()
        merged[f"{module}.weight"] = (weight.float() + delta).to(weight.dtype)
    return merged


def read_version(policy: PolicyPublished, folder: Path) -> dict[str, torch.Tensor]:
    """The checked tensors of a version of the model in ``folder``, whole: adapters are merged. Raises `WeightsRejected`."""
    return complete_version(policy, read_weights(policy.uri, policy.manifest), folder)


def complete_version(policy: PolicyPublished, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The checked tensors of a version with those of the model in ``folder`` if they are adapters. Raises `WeightsRejected`."""
    if not has_adapters(tensors):
        return dict(tensors)
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return merge_adapters(policy.uri, tensors, {name: tensor for file in files for name, tensor in load_file(file).items()})


def write_configuration(folder: Path, ranks: Mapping[str, int]) -> None:
    """Write what PEFT and vLLM read beside the tensors: adapters of ``ranks`` by module, unscaled."""
    rank = max(ranks.values())
    if any(each != rank for each in ranks.values()):
        raise WeightsRejected(f"{folder.name}: adapters of several ranks: {min(ranks.values())} to {rank}")
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
    }  # fmt: skip
    (folder / CONFIGURATION).write_text(json.dumps(content))
