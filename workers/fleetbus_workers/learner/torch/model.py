"""The model that is trained: loaded from a folder, with adapters or without, and its weights as an engine wants them.

Engines know nothing of adapters or shards: what leaves here are whole tensors under the names of the model in the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fleetbus.config.settings import TrainerSettings
from fleetbus.errors import UserError
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharding import gather_tensor, shard_like

_ADAPTER = "default"


def load_model(folder: Path, settings: TorchTrainerSettings, device: torch.device) -> PreTrainedModel:
    """The causal language model of a folder, or its image-text model, without dropout; raises `UserError`."""
    kind = AutoModelForImageTextToText if settings.images else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(folder, dtype=getattr(torch, settings.dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        if not settings.images and has_vision(folder):
            raise UserError(f"{folder} contains an image-text model: set environment.images = true to train it") from error
        raise UserError(f"{folder} contains no model that transformers can load: {error}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def add_adapters(model: PreTrainedModel, settings: TrainerSettings) -> None:
    """Freeze the model and put LoRA adapters beside its linear layers (arXiv 2106.09685); raises `UserError`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError("trainer.lora_rank needs peft: pip install 'fleetbus[lora]'") from error
    targets = settings.lora_target_modules
    chosen: str | list[str] = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    config = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=chosen, lora_dropout=0.0)
    torch.manual_seed(0)
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"trainer.lora_target_modules = {targets}: {str(error).splitlines()[0]}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Gradient checkpointing per layer. Layers look at their own training flag; what is inside them stays without dropout."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"trainer.gradient_checkpointing: {type(model).__name__} does not support it")
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was loaded."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)


def gather_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the names of the folder's model: gathered from all shards, adapters merged into what they adapt."""
    deltas = {
        f"{name}.weight": delta for name, module in model.named_modules() if (delta := _compute_delta(module)) is not None
    }
    found = {}
    for name, tensor in _iterate_tensors(model):
        plain = name.replace(".base_layer.", ".")
        gathered = gather_tensor(tensor.detach())
        found[plain] = gathered + deltas[plain].to(gathered.dtype) if plain in deltas else gathered
    return found


def gather_adapters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of the adapters, gathered."""
    return {name: gather_tensor(parameter.detach()).cpu() for name, parameter in model.named_parameters() if ".lora_" in name}


def copy_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors into the parameters of these names, sharded where they are."""
    with torch.no_grad():
        for name, tensor in _iterate_tensors(model, adapters=True):
            if name in tensors:
                tensor.copy_(shard_like(tensors[name].to(tensor.dtype), tensor))


def _iterate_tensors(model: PreTrainedModel, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the buffers that are saved, tied ones once under their first name."""
    saved = model.state_dict()
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in model.named_parameters():
        if adapters or ".lora_" not in name:
            yield name, tensor
    for name, tensor in model.named_buffers():
        if name in saved and id(tensor) not in parameters:
            yield name, tensor


def _compute_delta(module: Any) -> torch.Tensor | None:
    """What an adapted linear layer adds to its weight."""
    if not hasattr(module, "lora_A") or _ADAPTER not in module.lora_A:
        return None
    with torch.no_grad():
        down, up = gather_tensor(module.lora_A[_ADAPTER].weight), gather_tensor(module.lora_B[_ADAPTER].weight)
        delta: torch.Tensor = (up.float() @ down.float()) * module.scaling[_ADAPTER]
    return delta.T if getattr(module, "fan_in_fan_out", False) else delta
