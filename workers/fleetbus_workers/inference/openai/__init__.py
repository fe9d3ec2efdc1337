"""OpenAI-compatible servers over HTTP: vLLM's token endpoint, completions with token ids, or, for evaluation, text alone."""

from fleetbus_workers.inference.openai.opening import open_engine
from fleetbus_workers.inference.openai.sampler import OpenAISampler

__all__ = ["OpenAISampler", "open_engine"]
