"""Names of weights: what files of a model call a tensor, and what transformers calls it in memory, where the two differ.

A mixture of experts lies in files as one matrix per expert, and in memory as one tensor per layer. What is published has the
names of files, which every engine reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COMPANIONS = (".json", ".jinja", ".txt", ".model")
"""Suffixes of what lies beside the weights in a model folder; an index of weights belongs to the weights."""


def copy_companions(model: Path, folder: Path) -> None:
    """Copy what lies beside the weights, as configuration and tokenizer, from one folder into another. Raises `OSError`."""
    for file in model.iterdir():
        if file.suffix in COMPANIONS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def has_other_names(model: object) -> bool:
    """True if files of a model that transformers loaded have other tensors than its memory."""
    return bool(getattr(model, "_weight_conversions", None))


def convert_to_memory(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name in files as tensors by name in the memory of ``model``, which is not changed; those that are the same in
    both are not copied. What does not belong there keeps its name."""
    import torch
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    with torch.device("meta"):
        empty = type(model)(model.config)
    loading = LoadStateDictConfig(
        dtype=None, device_map={"": torch.device("cpu")}, weight_mapping=list(model._weight_conversions)
    )
    found, _ = convert_and_load_state_dict_in_model(empty, dict(tensors), loading)
    converted = {name: tensor for name, tensor in empty.state_dict().items() if not tensor.is_meta}
    return converted | {name: tensors[name] for name in found.unexpected_keys if name in tensors}
