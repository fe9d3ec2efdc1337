"""Any registered Gymnasium environment with text actions, in this process; its blocking code runs in threads.

Everything is seeded, so the same actions lead to the same episode. Above it is the session of an environment worker, below it
`adapters.gymnasium.text`.

A task's ``config``: ``id`` (instead of the one in ``gym:ID``), ``kwargs`` (for `gymnasium.make`), ``actions`` (names in order),
``frames`` (true: rendered frames as images), ``modules`` (imported first, for ids that a package registers).
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import gymnasium

from fleetbus.errors import UserError
from fleetbus.user_code import load_module
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.action_text import extract_action
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.adapters.gymnasium.text import (
    LEGENDS,
    UnknownAction,
    format_observation,
    get_short_name,
    is_of_text,
    list_action_names,
    parse_action,
)
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, encode_image_file, insert_images
from fleetbus_workers.environment.normalization import INFO_BYTES, clip_values
from fleetbus_workers.environment.task_permissions import TaskPermissions, check_arguments

_MODULES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "ALE": "ale_py"}
"""Packages that register ids, by how these begin."""
_PLACEHOLDER = "<frame>"
MAX_THREADS = 1024
"""Of all these environments together: one each, and those that still run after their episode."""

NOTHING = TaskPermissions()

_threads = anyio.CapacityLimiter(MAX_THREADS)

T = TypeVar("T")


def build(context: AdapterContext) -> Factory:
    """Environments of the spec's id, else of the task's; what stands before a colon in it is the module or file that registers
    it. Raises `UserError` if it is not registered."""
    module, _, id = context.rest.rpartition(":")
    permissions, store_image = context.permissions, context.store_image
    if module:
        load_module(f"environment {context.spec!r}", module)
    if id:
        try:
            _register(id, ())
            gymnasium.spec(id)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"environment {context.spec!r}: {str(error).splitlines()[0]}") from error
    return Factory(lambda: GymnasiumEnvironment(id, store_image=store_image, permissions=permissions))


class GymnasiumEnvironment:
    """One episode. An action that does not exist costs a turn and changes nothing."""

    replayable = True

    def __init__(self, id: str = "", *, store_image: StoreImage | None = None, permissions: TaskPermissions = NOTHING) -> None:
        self._permissions = permissions
        self._id = id
        self._store_image = store_image
        self._environment: gymnasium.Env[Any, Any] | None = None
        self._frames = False
        self._busy = False
        self._left = False
        self._computing = threading.Lock()
        self._names: tuple[str, ...] = ()
        self._rewards: list[float] = []

    async def open(self, task: Task) -> None:
        self._task = task
        self._frames = task.config.get("frames") is True
        await self._run_in_thread(self._make)

    def _make(self) -> None:
        config = self._task.config
        id = str(config.get("id") or self._id)
        modules = [str(module) for module in config.get("modules", ())]
        if ":" in id:  # before it stands the module that registers it
            module, _, id = id.rpartition(":")
            modules.append(module)
        for module in modules:
            self._permissions.check_module(module, framework="gymnasium")
        arguments = check_arguments(config.get("kwargs", {}), "kwargs")
        if not id:
            raise EnvironmentFailed(f"task {self._task.key} names no environment: write gym:ID, or an id in its config")
        _register(id, modules)
        modes = _render_modes(id)
        mode = "rgb_array" if self._frames else "ansi" if "ansi" in modes else None
        if self._frames and mode not in modes:
            raise EnvironmentFailed(f"{id} renders no frames")
        if mode is not None:  # a class that renders nothing need not know the argument
            arguments = {**arguments, "render_mode": mode}
        self._environment = gymnasium.make(id, **arguments)
        self._names = list_action_names(self._environment, config.get("actions", ()))

    async def reset(self) -> Start:
        seed = find_seed(self._task)
        text, pictures = await self._run_in_thread(lambda: self._render(self._require_env().reset(seed=seed)[0]))
        space = self._require_env().action_space
        form = ": " + ", ".join(self._names) if self._names else ", as text" if is_of_text(space) else f", as JSON for {space}"
        asked = f"Answer with one action{form}."
        parts = (
            self._task.prompt,
            LEGENDS.get(get_short_name(self._require_env()), "") if not self._frames else "",
            asked,
            text,
        )
        return Start(messages=(await self._message("\n\n".join(filter(None, parts)), pictures),))

    async def step(self, action: Action) -> Step:
        try:
            chosen = parse_action(extract_action(action.text), self._require_env(), self._names)
        except UnknownAction as unknown:
            self._rewards.append(0.0)
            return Step(messages=(ChatMessage(role="user", content=str(unknown)),), tool_errors=1)
        reward, terminated, truncated, info, (text, pictures) = await self._run_in_thread(lambda: self._apply_action(chosen))
        self._rewards.append(reward)
        return Step(
            messages=(await self._message(text, pictures),),
            reward=reward,
            terminated=terminated,
            truncated=truncated and not terminated,
            info=info,
        )

    def _apply_action(self, chosen: object) -> tuple[float, bool, bool, dict[str, object], tuple[str, list[EncodedImage]]]:
        observation, reward, terminated, truncated, info = self._require_env().step(chosen)
        parts = clip_values(info, INFO_BYTES)
        return float(reward), bool(terminated), bool(truncated), parts, self._render(observation)

    def _render(self, observation: Any) -> tuple[str, list[EncodedImage]]:
        if not self._frames:
            return format_observation(self._require_env(), observation), []
        return _PLACEHOLDER, [encode_image_file(self._require_env().render())]

    async def _message(self, text: str, pictures: list[EncodedImage]) -> ChatMessage:
        return ChatMessage(role="user", content=await insert_images(text, pictures, self._store_image, _PLACEHOLDER))

    async def state(self) -> dict[str, Any]:
        return {"id": self._require_env().spec.id if self._require_env().spec else "", "steps": len(self._rewards)}  # type: ignore[union-attr]

    async def verify(self) -> Verdict:
        """The sum of the rewards."""
        return Verdict(reward=math.fsum(self._rewards))

    async def close(self) -> None:
        """Close it; while a call that was cut short still runs in its thread, that thread does so at its end."""
        self._left = True
        await anyio.to_thread.run_sync(self._close_unless_computing, abandon_on_cancel=True, limiter=_threads)

    def _close_unless_computing(self) -> None:
        if self._computing.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._computing.release()

    def _release(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking code; cancelling does not wait for it, and nothing else touches the environment then."""
        if self._busy:
            raise EnvironmentFailed("an earlier call of the environment still runs")

        def compute() -> T:
            with self._computing:
                try:
                    return work()
                finally:
                    if self._left:
                        self._release()

        self._busy = True
        result = await anyio.to_thread.run_sync(compute, abandon_on_cancel=True, limiter=_threads)
        self._busy = False
        return result

    def _require_env(self) -> gymnasium.Env[object, object]:
        if self._environment is None:
            raise EnvironmentFailed("the environment was never opened, or is closed")
        return self._environment


def _register(id: str, modules: Any) -> None:
    """Import what registers ``id``; a package that is not there shows as an unknown id later."""
    for module in modules:
        importlib.import_module(str(module))
    known = _MODULES.get(id.partition("-")[0].partition("/")[0])
    if known is not None and id not in gymnasium.registry:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it would greet on standard output
        with suppress(ModuleNotFoundError):
            gymnasium.register_envs(importlib.import_module(known))


def _render_modes(id: str) -> list[str]:
    entry = gymnasium.spec(id).entry_point
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list(getattr(kind, "metadata", {}).get("render_modes", ()))
