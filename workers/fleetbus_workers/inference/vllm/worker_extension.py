"""The methods that vLLM's worker processes are given beside their own: a reload that also reaches experts on a CPU, and
versions that come from the learner.

This module is imported by vLLM's processes alone.
"""

from typing import Any

from fleetbus_workers.inference.vllm.receptions import Receptions


class WorkerExtension:
    """Mixed into vLLM's worker, whose constructor is the only one that is called."""

    @property
    def receptions(self) -> Receptions:
        """Of this process."""
        made: Receptions = vars(self).setdefault("_fleetbus_receptions", Receptions())
        return made

    def reload_checkpoint(self, folder: str) -> None:
        """``reload_weights`` from a folder."""
        worker: Any = self
        _forget_expert_kernels(worker)
        worker.reload_weights(weights_path=folder)

    def begin_reception(self, address: str, port: int, token: str, limit_bytes: int, seconds: float) -> None:
        """See `Receptions.begin`."""
        self.receptions.begin(address, port, token, limit_bytes, seconds)

    def describe_reception(self, token: str) -> str | None:
        """See `Receptions.describe`."""
        return self.receptions.describe(token)

    def give_up_reception(self, token: str) -> None:
        """See `Receptions.give_up`."""
        self.receptions.give_up(token)

    def check_received(self, token: str, manifest: bytes) -> str:
        """See `Receptions.check`."""
        return self.receptions.check(token, manifest)

    def load_received(self, token: str, manifest: bytes, head: dict[str, str]) -> None:
        """``reload_weights`` from what was received. ``head``: a tensor that is to be loaded under another name as well."""
        worker: Any = self
        tensors = self.receptions.take(token, manifest)
        tensors |= {name: tensors[source] for name, source in head.items()}
        _forget_expert_kernels(worker)
        worker.reload_weights(weights_iterator=iter(tensors.items()))


def _forget_expert_kernels(worker: Any) -> None:
    """On a CPU vLLM packs experts when their kernel is made, and not again when it reloads them (seen with 0.32: unpacked
    numbers in packed places, log-probabilities off by .3, and no error), so the kernels are made anew."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in worker.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
