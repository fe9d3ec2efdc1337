"""Defines what an adapter gets and gives: ``build(context)`` makes a factory of environments, one per episode.

Above it are the table of adapters and the environment worker; below it nothing but settings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from fleetbus.config.settings import Configuration
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.task_permissions import TaskPermissions, read_permissions

if TYPE_CHECKING:
    from fleetbus_workers.environment.adapters.mcp.environment import PromptStyle
    from fleetbus_workers.environment.images.observation import StoreImage
    from fleetbus_workers.environment.isolation.verifier import Grader


class EnvironmentFactory(Protocol):
    """Makes the environment of an episode. `run` is entered around all of them: it holds what outlives an episode."""

    def __call__(self) -> Environment: ...

    def run(self) -> AbstractAsyncContextManager[None]: ...


@asynccontextmanager
async def _hold_nothing() -> AsyncIterator[None]:
    await anyio.lowlevel.checkpoint()
    yield


class Factory:
    """A factory from its parts."""

    def __init__(
        self, make: Callable[[], Environment], run: Callable[[], AbstractAsyncContextManager[None]] = _hold_nothing
    ) -> None:
        self._make = make
        self.run = run

    def __call__(self) -> Environment:
        return self._make()


@dataclass(frozen=True, kw_only=True)
class AdapterContext:
    """A spec, ``form:rest``, and what its environments are made with. ``prompt`` overrides how tools are described to the
    policy. ``store_image`` stores the images that environments show; without it a placeholder text replaces each.
    ``build`` makes the factory of another context."""

    spec: str
    grader: Grader
    observation_bytes: int = 32_768
    prompt: PromptStyle | None = None
    settings: Configuration = field(default_factory=Configuration)
    store_image: StoreImage | None = None
    build: Callable[[AdapterContext], EnvironmentFactory] | None = None

    @property
    def form(self) -> str:
        """The part before the first colon."""
        return self.spec.partition(":")[0]

    @property
    def rest(self) -> str:
        """The part after it; empty if there is none."""
        return self.spec.partition(":")[2]

    @property
    def call_seconds(self) -> float:
        """Limit of one call of a tool."""
        return self.settings.limits.tool_call

    @property
    def permissions(self) -> TaskPermissions:
        """Permissions of the config of a task."""
        return read_permissions(self.settings.environment)

    def grading_arguments(self, style: PromptStyle) -> dict[str, Any]:
        """The arguments of every environment with tools and a verifier."""
        return {"grader": self.grader, "prompt": self.prompt or style, "observation_bytes": self.observation_bytes}

    def mcp_arguments(self, style: PromptStyle) -> dict[str, Any]:
        """The arguments of every environment over MCP."""
        settings = self.settings.environment
        output_chars = settings.output_chars if settings.context_tools else None
        return {
            **self.grading_arguments(style),
            "output_chars": output_chars,
            "parallel_calls": settings.parallel_calls,
            "store_image": self.store_image,
        }

    def build_factory(self, spec: str) -> EnvironmentFactory:
        """The factory of another spec, with all else the same."""
        assert self.build is not None
        return self.build(replace(self, spec=spec))
