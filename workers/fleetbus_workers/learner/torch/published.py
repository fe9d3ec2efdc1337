"""The weights of a model as an engine wants them: whole, under the names of the files of its folder, one group at a time.

Transformers keeps some weights in memory under other names than in files: the experts of a layer are one tensor here and
hundreds there. What belongs together is gathered together, on the leader's CPU alone, and given back before the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from fleetbus_workers.learner.torch.sharding import Shards


class FileTensor(NamedTuple):
    """A tensor as it is published."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Source = Mapping[str, Callable[[], torch.Tensor]]
"""By name in memory what gathers a tensor on the leader's CPU; every process has to call it, followers get an empty one."""


class PublishedTensors:
    """``tensors`` are shapes and types of the model's weights by name in memory, as they are to be published."""

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._groups = group_names(model, list(tensors))
        meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
        self.layout: list[FileTensor] = []
        for group in self._groups:
            renamed = revert_weight_conversion(model, {name: meta[name] for name in group})
            self.layout += [FileTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in renamed.items()]

    def gather(self, source: Source, shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in the order of ``layout``, on the leader; nothing on followers, which have to iterate all the same."""
        for group in self._groups:
            gathered = {name: source[name]() for name in group}
            if shards.rank == 0:
                yield from revert_weight_conversion(self._model, gathered).items()


def group_names(model: PreTrainedModel, names: Sequence[str]) -> list[list[str]]:
    """Names that are converted into those of files together, in order; most stand alone."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    converters = [
        each for each in (known.reverse_transform() for known in reversed(conversions)) if isinstance(each, WeightConverter)
    ]
    groups: dict[str, list[str]] = {}
    for name in names:
        renamings = (converter.rename_source_key(name) for converter in converters)
        renamed = next((renamed for renamed, pattern in renamings if pattern is not None), f"={name}")
        groups.setdefault(renamed, []).append(name)
    return list(groups.values())
