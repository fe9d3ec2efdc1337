"""Functions of tensors as single calls that do not hold the interpreter lock.

A step of a small model is a hundred short calls, and between any two of them the event loop's thread may take the lock from
the sampling thread, or have to wait for it. TorchScript turns them into one call; its arithmetic is the same.
"""

import sys
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compile_function(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` compiled by TorchScript where that is supported, or else as it is."""
    if sys.version_info >= (3, 14):
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated in favour of exporting models, which this is not
        return cast(Callable[P, R], torch.jit.script(function))
