"""One model over several processes: FSDP2 shards, what they have to exchange, and whole tensors out of shards.

Under ``torchrun`` every process holds a shard of each weight and trains on its share of the micro-batches. Nothing here knows
what is trained; without ``torchrun`` there is one process, and everything is what it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fleetbus.errors import UserError
from fleetbus_workers.command.exit_status import CRASHED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAST_WORDS_SECONDS = 5.0
"""What the leader gets to end by itself and say why: what ends a process often ends all of them, and it alone is read."""

log = structlog.get_logger()


class PeerWatch:
    """Ends this process at once when another of those that share its model is gone: a collective on GPUs would not notice.

    Each process listens to its neighbour in a thread, over TCP; one that is gone without a word ends it, and so round the ring.
    The launcher then starts all of them again. Watches from when it is made until `close`; every process has to make one.
    ``limit`` is longer than any run.
    """

    def __init__(self, limit: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=limit)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._listen, name="peer-watch", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        neighbour = (self._rank + 1) % self._world
        try:
            dist.recv(torch.zeros(1), src=neighbour, group=self._group)
        except RuntimeError as error:
            log.error("process of the shared model is gone; ending this one too", process=neighbour, reason=str(error)[:200])
            if self._rank == 0:
                time.sleep(LAST_WORDS_SECONDS)
            os._exit(CRASHED)  # the other threads may stand in a collective that nothing ends

    def close(self) -> None:
        """Take leave of who listens here, and wait for the neighbour's leave. Every process has to call it."""
        dist.send(torch.ones(1), dst=(self._rank - 1) % self._world, group=self._group)
        self._thread.join()


COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Of what all processes compute together: one that hangs ends all of them, to be started again."""

IDLE_TIMEOUT = timedelta(days=14)
"""Followers wait for the leader's next batch as long as episodes take, and for a checkpoint as long as a slow disk takes; a
process that dies ends every wait at once (`fleetbus_workers.learner.torch.sharding`)."""

T = TypeVar("T")


class Shards:
    """This process among ``world`` ones; ``rank`` 0 leads."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, precision: torch.dtype = torch.float32) -> None:
        self._device = device
        self._mesh = mesh
        self._precision = precision
        self.world = mesh.size() if mesh is not None else 1
        self._sharing = mesh.size(-1) if mesh is not None else 1  # processes that one copy of the model is sharded over
        self.rank = mesh.get_rank() if mesh is not None else 0
        self.background = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if mesh is not None else None
        """For what threads beside the training agree on; None: there is one process."""
        # Objects travel over gloo: pickled tensors of a GPU would all arrive on the sender's device number.
        self._calls = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if mesh is not None else None
        self._peers = PeerWatch(IDLE_TIMEOUT) if mesh is not None else None
        self._cpu_mesh = mesh if mesh is None or device.type == "cpu" else init_device_mesh("cpu", tuple(mesh.shape))

    def shard(self, model: PreTrainedModel) -> None:
        """Shard a model that is whole, layer by layer; its parameters become `DTensor`s."""
        if self._mesh is None:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        lower = self._precision if self._precision != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32 if lower else None)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=self._mesh, mp_policy=policy)
        # By default the top keeps its whole weights until a backward pass. A pass without one, which only measures, would leave
        # them behind for the next step, and that step would see the weights from before the update.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)

    def split_items(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's items, as many as every other's, because collectives must match; False marks one that is run along
        and must not count."""
        rounds = -(-len(items) // self.world)
        places = [turn * self.world + self.rank for turn in range(rounds)]
        return [(items[place], True) if place < len(items) else (items[0], False) for place in places]

    def average_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Of parameters that every process holds whole, such as adapters; those of shards were averaged on their way."""
        for parameter in parameters if self._mesh is not None else ():
            if not hasattr(parameter, "full_tensor"):
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                dist.all_reduce(gradient)
                parameter.grad = gradient.div_(self.world)

    def sum_across(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max_across(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def merge_across(self, own: dict[int, T]) -> dict[int, T]:
        """The entries of all processes; tensors arrive on the CPU."""
        if self._mesh is None:
            return own
        found: list[Any] = [None] * self.world
        own = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in own.items()}  # type: ignore[misc]
        dist.all_gather_object(found, own)
        return {key: value for part in found for key, value in part.items()}

    def gather_to_leader(self, tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All of a tensor on the leader's CPU, in ``dtype`` if that is given; an empty one on the others. Every process has to
        ask, and none but the leader ever holds more than its shard."""
        tensor = tensor.detach()
        if not hasattr(tensor, "full_tensor"):
            return tensor.to("cpu", dtype) if self.rank == 0 else torch.empty(0)
        if self.rank >= self._sharing:
            return torch.empty(0)  # a further copy of the model
        own: torch.Tensor = tensor.to_local()
        rows = -(-tensor.shape[0] // self._sharing)  # the last ones may hold fewer, or none
        if len(own) < rows or (dtype is not None and own.dtype != dtype):
            padded = own.new_zeros((rows, *own.shape[1:]), dtype=dtype or own.dtype)
            padded[: len(own)] = own
            own = padded
        if self.rank:
            dist.send(own.contiguous(), dst=0)
            return torch.empty(0)
        whole = own.new_empty((rows * self._sharing, *own.shape[1:]))
        whole[:rows] = own
        for source, part in enumerate(whole.chunk(self._sharing)[1:], start=1):
            dist.recv(part, src=source)  # one by one: gloo's own gather makes the whole a second time
        return whole[: tensor.shape[0]].cpu()

    def copy_to_cpu(self, tensor: Any) -> torch.Tensor:
        """A copy in the CPU's memory of what this process holds; sharded as ``tensor`` is."""
        return self._place_on_cpu(get_local(tensor.detach()).to("cpu", copy=True), tensor)

    def build_zeros_on_cpu(self, tensor: Any) -> torch.Tensor:
        """The same, of zeros."""
        return self._place_on_cpu(torch.zeros_like(get_local(tensor.detach()), device="cpu"), tensor)

    def _place_on_cpu(self, own: torch.Tensor, tensor: Any) -> torch.Tensor:
        """``own`` as this process's part of what is sharded as ``tensor``, if that is sharded."""
        if not hasattr(tensor, "full_tensor"):
            return own
        return DTensor.from_local(
            own, self._cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def broadcast(self, message: object = None) -> Any:
        """The leader's message; the others wait for it."""
        carried = [message]
        if self._mesh is not None:
            dist.broadcast_object_list(carried, src=0, group=self._calls)
        return carried[0]

    def enter_thread(self) -> None:
        """Call before anything else in each thread: which GPU is the current one is a thread's own affair."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def close(self) -> None:
        """Leave the other processes, which have to leave too."""
        if self._peers is not None and dist.is_initialized():
            self._peers.close()
            dist.destroy_process_group()

    def _all_reduce(self, values: Sequence[float], operation: object) -> list[float]:
        if self._mesh is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation)
        found: list[float] = tensor.tolist()
        return found


def init_shards(device: torch.device, precision: torch.dtype = torch.float32, sharing: int = 0) -> Shards:
    """The processes that ``torchrun`` started, this one alone without it. ``precision`` is what a sharded model computes in.
    Each ``sharing`` of them hold a copy of the model between them (HSDP); 0: all hold one. Raises `UserError`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Shards(device, None)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    sharing = sharing or world
    if world % sharing:
        raise UserError(f"trainer.shard_processes = {sharing} does not divide the learner's {world} processes")
    shape = (world,) if sharing == world else (world // sharing, sharing)
    # PEFT 0.21 makes adapters of a shard's size, as for tensor parallelism, unless the only dimension has this name.
    return Shards(device, init_device_mesh(device.type, shape, mesh_dim_names=("copies", "fsdp")[-len(shape) :]), precision)


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one; under ``torchrun`` each process takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(name)
    return torch.device("cuda:0" if name == "cuda" else name)  # only one with a number can be a thread's current one


def get_local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this process holds; it shares its memory."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every process; every process has to ask. For small ones: see `Shards.gather_to_leader`."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered
