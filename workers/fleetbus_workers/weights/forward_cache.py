"""The cache of keys and values in calls of a transformers model, under the name that its release gives it.

Source: transformers 5.24 renamed ``past_key_values`` to ``cache`` and warns of the old name, which ends in 5.40. The newest
that vLLM 0.33 takes, 5.20, knows the old one alone.
"""

import inspect
from dataclasses import fields
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

OLD = "past_key_values"
NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else OLD


def build_cache_options(model: torch.nn.Module, cache: object) -> dict[str, Any]:
    """Arguments of ``model``'s forward that make it read from ``cache`` and write to it."""
    # A model of someone else's, loaded with its own code, may know the old name alone.
    name = OLD if OLD in inspect.signature(model.forward).parameters else NAME
    return {name: cache, "use_cache": True}


def get_cache(output: object) -> Any:
    """The cache in what a forward call returned; None if the model keeps none."""
    return getattr(output, NAME, None)
