"""A model whose processes each read their own shard from the folder: none of them ever holds the whole.

The model is made without memory, sharded, and then filled tensor by tensor with what lies in the folder's safetensors files, of
which each process reads its rows alone. Transformers' own loader does the reading and the renaming (a mixture of experts lies
in files as one matrix per expert and in memory as one per layer); here is what ``from_pretrained`` does around it, which for
sharded models wants accelerate.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from fleetbus.errors import UserError


def load_sharded(
    kind: Any, folder: Path, device: torch.device, *, shard: Callable[[PreTrainedModel], None], options: dict[str, object]
) -> PreTrainedModel:
    """The model of ``folder``, of the auto class ``kind``; ``shard`` shards it while it has no memory. ``options`` are those of
    ``from_config``, ``dtype`` among them. Every process has to ask.

    Raises `OSError` or `ValueError` for a folder without a model, and `UserError` for one whose files do not fill it.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, **options)
    shard(model)
    loading = LoadStateDictConfig(
        dtype=options["dtype"], device_map={"": device}, weight_mapping=get_model_conversion_mapping(model)
    )
    found, _ = convert_and_load_state_dict_in_model(model, open_slices(folder), loading)
    empty = _fill_empty_shards(model, device)
    wrong = sorted({*found.missing_keys, *(str(each[0]) for each in found.mismatched_keys), *found.conversion_errors})
    wrong = [name for name in wrong if name not in empty and name not in model.all_tied_weights_keys]
    if wrong:
        raise UserError(f"{folder}: {len(wrong)} tensors are missing or of another shape than its config.json says: {wrong[0]}")
    _fill_buffers(model, device)
    model.tie_weights()
    return model


def open_slices(folder: Path) -> dict[str, object]:
    """By name, what reads any part of a tensor in the folder's safetensors files. Raises `UserError` if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors files: a model that is sharded is read from those")
    slices: dict[str, object] = {}
    for file in files:
        try:
            stored = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
        slices |= {name: stored.get_slice(name) for name in stored.keys()}  # type: ignore[no-untyped-call]
    return slices


def _fill_empty_shards(model: PreTrainedModel, device: torch.device) -> set[str]:
    """Names of tensors of which this process holds no rows: with fewer experts than processes some hold none."""
    empty = set()
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and hasattr(parameter, "to_local") and not (own := parameter.to_local()).numel():
            held = DTensor.from_local(
                torch.empty_like(own, device=device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, torch.nn.Parameter(held))
            empty.add(name)
    return empty


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Fill what no file holds because it follows from the configuration, such as the frequencies of rotary embeddings."""
    owners = {}
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, attribute = name.rpartition(".")
        owners[path] = owner = model.get_submodule(path)
        setattr(owner, attribute, torch.empty_like(buffer, device=device))
    with torch.no_grad():
        for owner in owners.values():
            model._init_weights(owner)  # leaves alone what was loaded
