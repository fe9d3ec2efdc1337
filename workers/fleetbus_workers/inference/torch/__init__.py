"""The embedded engine: torch and transformers in a thread of the inference worker's own process."""

from fleetbus_workers.inference.torch.opening import open_engine
from fleetbus_workers.inference.torch.sampler import TorchSampler

__all__ = ["TorchSampler", "open_engine"]
