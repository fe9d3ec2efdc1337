"""The methods that vLLM's worker processes are given beside their own: a reload that also reaches experts on a CPU.

This module is imported by vLLM's processes alone.
"""

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def reload_checkpoint(self, folder: str) -> None:
        """``reload_weights`` from a folder.

        On a CPU vLLM packs experts when their kernel is made, and not again when it reloads them (seen with 0.32: unpacked
        numbers in packed places, log-probabilities off by .3, and no error), so the kernels are made anew.
        """
        from vllm.platforms import current_platform

        worker: Any = self
        if current_platform.is_cpu():
            for module in worker.model_runner.get_model().modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        worker.reload_weights(weights_path=folder)
