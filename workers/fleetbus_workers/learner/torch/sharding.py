"""One model over several processes: FSDP2 shards, what they have to exchange, and whole tensors out of shards.

Under ``torchrun`` every process holds a shard of each weight and trains on its share of the micro-batches. Nothing here knows
what is trained; without ``torchrun`` there is one process, and everything is what it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

COLLECTIVE_TIMEOUT = timedelta(days=14)
"""Followers wait for the leader's next batch as long as episodes take; a leader that dies ends their wait at once."""

T = TypeVar("T")


class Shards:
    """This process among ``world`` ones; ``rank`` 0 leads."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None) -> None:
        self._device = device
        self._mesh = mesh
        self.world = mesh.size() if mesh is not None else 1
        self.rank = mesh.get_rank() if mesh is not None else 0

    def shard(self, model: PreTrainedModel) -> None:
        """Shard a model that is whole, layer by layer; its parameters become `DTensor`s."""
        if self._mesh is None:
            return
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=self._mesh)
        # By default the top keeps its whole weights until a backward pass. A pass without one, which only measures, would leave
        # them behind for the next step, and that step would see the weights from before the update.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)

    def split_items(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's items, as many as every other's, because collectives must match; False marks one that is run along
        and must not count."""
        rounds = -(-len(items) // self.world)
        places = [turn * self.world + self.rank for turn in range(rounds)]
        return [(items[place], True) if place < len(items) else (items[0], False) for place in places]

    def sum_across(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max_across(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def merge_across(self, own: dict[int, T]) -> dict[int, T]:
        """The entries of all processes."""
        if self._mesh is None:
            return own
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own)
        return {key: value for part in found for key, value in part.items()}

    def broadcast(self, message: object = None) -> Any:
        """The leader's message; the others wait for it."""
        carried = [message]
        if self._mesh is not None:
            dist.broadcast_object_list(carried, src=0)
        return carried[0]

    def close(self) -> None:
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _all_reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self._mesh is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        found: list[float] = tensor.tolist()
        return found


def init_shards(device: torch.device) -> Shards:
    """The processes that ``torchrun`` started, this one alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Shards(device, None)
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return Shards(device, init_device_mesh(device.type, (world,)))


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one; under ``torchrun`` each process takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(name)
    return torch.device(name)


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor; every process has to ask."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def shard_like(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A whole tensor, sharded like ``parameter``; every process has to give the same."""
    if not hasattr(parameter, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: torch.Tensor = distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return sharded
