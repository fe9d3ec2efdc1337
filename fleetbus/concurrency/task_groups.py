"""Task groups that raise a plain exception instead of an exception group.

A plain task group raises a group of errors, which no ``except BusError`` of a caller fits.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_first_error_task_group() -> AsyncGenerator[TaskGroup]:
    """A task group for the length of the block; raises the first error of its tasks or its body, without the others."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


@asynccontextmanager
async def open_flat_task_group() -> AsyncGenerator[TaskGroup]:
    """A task group whose only error comes out as itself; several stay a group, so that none is lost."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        raise
