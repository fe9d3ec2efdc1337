"""vLLM in this process (its engine core and workers are processes of their own): tokens in, tokens out."""

from fleetbus_workers.inference.vllm.opening import open_engine
from fleetbus_workers.inference.vllm.sampler import VllmSampler

__all__ = ["VllmSampler", "open_engine"]
