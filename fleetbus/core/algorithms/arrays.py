"""The little of the array API that the algorithms need, so that one formula serves NumPy arrays and torch tensors.

Nothing is imported here: the namespace is that of the array that comes in.
"""

import sys
from typing import Any

Array = Any
"""A NumPy array or a torch tensor."""


def find_namespace(array: Array) -> Any:
    """The module whose functions take ``array``: what its class declares, else the package that defines its class."""
    declared = getattr(array, "__array_namespace__", None)
    return declared() if declared is not None else sys.modules[type(array).__module__.partition(".")[0]]


def stop_gradient(array: Array) -> Array:
    """``array`` as a constant: the same values, and no gradient where there are gradients."""
    detach = getattr(array, "detach", None)
    return array if detach is None else detach()
