"""The embedded engine: torch and transformers in a thread of the inference worker's own process."""

from workers.inference.torch.sampler import TorchSampler

__all__ = ["TorchSampler"]
