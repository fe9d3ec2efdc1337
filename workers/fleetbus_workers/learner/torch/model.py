"""The model that is trained: loaded from a folder, with adapters or without, and its weights as an engine wants them.

Engines know nothing of adapters or shards: what leaves here are whole tensors under the names of the model in the folder.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from fleetbus.config.settings import TrainerSettings
from fleetbus.errors import UserError
from fleetbus_schemas import TensorEntry
from fleetbus_workers.images.model_folder import has_vision
from fleetbus_workers.learner.torch import onednn_linear
from fleetbus_workers.learner.torch.packed_attention import split_packed_rows
from fleetbus_workers.learner.torch.published import PublishedTensors
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.sharded_loading import load_sharded
from fleetbus_workers.learner.torch.sharding import Shards
from fleetbus_workers.weights.adapters import DOWN, PREFIX, UP
from fleetbus_workers.weights.file import WritingWatcher, stream_weights, write_weights

_ADAPTER = "default"


def load_model(folder: Path, settings: TorchTrainerSettings, device: torch.device, shards: Shards) -> PreTrainedModel:
    """The causal language model of a folder, or its image-text model, without dropout; raises `UserError`. With several
    processes each loads its shard alone."""
    kind = AutoModelForImageTextToText if settings.images else AutoModelForCausalLM
    options: dict[str, object] = {"dtype": getattr(torch, settings.dtype)}
    if settings.trainer.attention != "auto":
        options["attn_implementation"] = settings.trainer.attention
    try:
        if shards.world > 1:
            model = load_sharded(kind, folder, device, shard=shards.shard, options=options)
        else:
            model = kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, ImportError) as error:
        if not settings.images and has_vision(folder):
            raise UserError(f"{folder} contains an image-text model: set environment.images = true to train it") from error
        raise UserError(f"{folder} contains no model that transformers can load: {error}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    if settings.trainer.packing:
        split_packed_rows(loaded)
    if shards.world == 1 and device.type == "cpu" and onednn_linear.is_faster():
        onednn_linear.replace_linear(loaded)
    return loaded


def load_teacher(
    policy: PreTrainedModel, settings: TorchTrainerSettings, device: torch.device, shards: Shards
) -> PreTrainedModel | None:
    """The model that is distilled, None if there is none. Raises `UserError` unless it takes the policy's tokens."""
    if not settings.algorithm.teacher:
        return None
    folder = Path(settings.algorithm.teacher)
    teacher = load_model(folder, settings, device, shards).requires_grad_(False)
    own, its = (model.get_input_embeddings().weight.shape[0] for model in (policy, teacher))
    if own > its:
        raise UserError(f"algorithm.teacher = {folder}: it has {its} tokens, the policy {own}: they have to share a tokenizer")
    return teacher


def add_adapters(model: PreTrainedModel, settings: TrainerSettings) -> None:
    """Freeze the model and put LoRA adapters beside its linear layers (arXiv 2106.09685); raises `UserError`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError("trainer.lora_rank needs peft: pip install 'fleetbus[lora]'") from error
    targets = settings.lora_target_modules
    chosen = _list_linear(model) if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    config = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=chosen, lora_dropout=0.0)
    torch.manual_seed(0)
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"trainer.lora_target_modules = {targets}: {str(error).splitlines()[0]}") from error
    for name, layer in model.named_modules():
        if _ADAPTER not in getattr(layer, "lora_B", ()):
            continue
        rows = layer.lora_B[_ADAPTER].weight.shape[0]
        if rows != getattr(layer.base_layer, "out_features", rows):
            raise UserError(f"this version of peft gives {name} adapters of a shard's size: leave trainer.shard_processes out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _list_linear(model: PreTrainedModel) -> list[str]:
    """Linear layers but the head. PEFT's own ``all-linear`` takes experts too (0.21), which are no layers in memory and whose
    adapters no engine reads."""
    head = model.get_output_embeddings()
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D)))
    return [name for name, module in layers if module is not head]


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Gradient checkpointing per layer. Layers look at their own training flag; what is inside them stays without dropout."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"trainer.gradient_checkpointing: {type(model).__name__} does not support it")
    # transformers 5.20, the newest that vLLM 0.33 takes, has the older name alone
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
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


def write_model_weights(
    model: PreTrainedModel,
    file: Path,
    shards: Shards,
    dtype: torch.dtype | None = None,
    watcher: WritingWatcher | None = None,
) -> tuple[TensorEntry, ...]:
    """Write the weights under the names of the folder's files, floating point ones in ``dtype`` if that is given: adapters
    merged into what they adapt, gathered tensor by tensor on the leader's CPU. Every process has to ask; the others return ().

    Raises `OSError` (on the leader, after all tensors were gathered: the others do not wait for ever).
    """
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if _has_adapter(module)}
    tensors, source = {}, {}
    for name, tensor in iterate_tensors(model):
        plain = name.replace(".base_layer.", ".")
        published = dtype if dtype is not None and tensor.is_floating_point() else None
        tensors[plain] = torch.empty(tensor.shape, dtype=published or tensor.dtype, device="meta")
        source[plain] = partial(_gather_merged, shards, tensor, adapted.get(plain), published)
    published_tensors = PublishedTensors(model, tensors)
    gathered = published_tensors.gather(source, shards)
    if shards.rank:
        deque(gathered, maxlen=0)
        return ()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return stream_weights(file, published_tensors.layout, gathered, watcher)
    finally:
        deque(gathered, maxlen=0)  # what is left when the disk is full: the others are in the same collectives


def write_adapters(
    model: PreTrainedModel,
    file: Path,
    shards: Shards,
    dtype: torch.dtype | None = None,
    watcher: WritingWatcher | None = None,
) -> tuple[TensorEntry, ...]:
    """Write the adapters alone, named and scaled as `fleetbus_workers.weights.adapters` says. Every process holds them whole;
    all but the leader return (). Raises `OSError`."""
    if shards.rank:
        return ()
    tensors = {}
    for name, module in model.named_modules():
        if _has_adapter(module):
            down, up = (part[_ADAPTER].weight.detach().cpu() for part in (module.lora_A, module.lora_B))
            tensors[f"{PREFIX}{name}{DOWN}"] = down.to(dtype or down.dtype)
            tensors[f"{PREFIX}{name}{UP}"] = (up * module.scaling[_ADAPTER]).to(dtype or up.dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_weights(file, tensors, watcher)


def _gather_merged(shards: Shards, tensor: torch.Tensor, adapter: object, dtype: torch.dtype | None) -> torch.Tensor:
    if adapter is None:
        return shards.gather_to_leader(tensor, dtype)
    whole = shards.gather_to_leader(tensor)
    delta = _compute_delta(adapter)
    return (whole + delta.to("cpu", whole.dtype)).to(dtype or whole.dtype) if shards.rank == 0 else whole


def iterate_tensors(model: PreTrainedModel, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the buffers that are saved, tied ones once under their first name."""
    saved = model.state_dict()
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in model.named_parameters():
        if adapters or ".lora_" not in name:
            yield name, tensor
    for name, tensor in model.named_buffers():
        if name in saved and id(tensor) not in parameters:
            yield name, tensor


def _has_adapter(module: object) -> bool:
    return hasattr(module, "lora_A") and _ADAPTER in module.lora_A


def _compute_delta(module: Any) -> torch.Tensor:
    """The tensor that an adapted linear layer adds to its weight."""
    with torch.no_grad():
        down, up = module.lora_A[_ADAPTER].weight, module.lora_B[_ADAPTER].weight
        delta: torch.Tensor = (up.float() @ down.float()) * module.scaling[_ADAPTER]
    return delta.T if getattr(module, "fan_in_fan_out", False) else delta
