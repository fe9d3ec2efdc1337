"""The remote-gym service around a user's own environment class: the same gateway, with everything in one process.

    class MyHandler(BaseGymHandler):
        async def create_env(self, env_config):
            return MyEnvironment(env_config)

    app = build_gym_service(MyHandler(session_timeout=1800.0, max_sessions=100))   # uvicorn.run(app)

An environment has ``reset(seed)``, ``step(action)``, ``system_prompt()`` and ``close()``, all asynchronous. Each call is
executed once, one at a time per session, however often a client repeats it.
"""

from __future__ import annotations

import inspect
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from starlette.applications import Starlette

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.client.sessions import sessions
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus_schemas import Action, ChatMessage, Heartbeat, Subjects, Task, encode
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.images.observation import insert_images
from fleetbus_workers.environment.normalization import to_plain_number
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker_context import WorkerContext
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls
from fleetbus_workers.gateway.image_format import ImageFormat, parse_image_format
from fleetbus_workers.gateway.images import PLACEHOLDER, InMemoryImageStore, encode_image_file

Callback = Callable[[], Any]

RUN = "gym"
WORKER = "local"
UNLIMITED_SLOTS = 4096


NOT_OVERRIDDEN = ("connect", "call")
"""What handlers of the protocol's own servers may override, and what nothing here would ask."""


class BaseGymHandler(ABC):
    """Makes environments. A session without a call for ``session_timeout`` seconds is closed; ``max_sessions`` 0: no limit."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        overridden = [name for name in NOT_OVERRIDDEN if name in vars(cls)]
        if overridden:
            raise TypeError(
                f"{cls.__name__} overrides {' and '.join(overridden)}, which are not asked here: sessions, repeated calls and "
                "images are the service's; change what create_env gives, or wrap the environment that it makes"
            )

    def __init__(self, session_timeout: float = 3600.0, max_sessions: int = 0) -> None:
        self.session_timeout = session_timeout
        self.max_sessions = max_sessions

    @abstractmethod
    async def create_env(self, env_config: dict[str, object]) -> Any:
        """A new environment for one session."""

    def get_session_stats(self) -> dict[str, object]:
        """The answer of ``/sessions`` of its service; there are none before a service was built."""
        limits = {"max_sessions": self.max_sessions, "session_timeout": self.session_timeout}
        return {"num_sessions": 0, **limits, "sessions": []}

    async def aclose(self) -> None:  # noqa: B027 - most handlers have nothing that outlives sessions
        """Release what outlives sessions; called once, when the service stops."""


class GymService:
    """The service as the protocol's newer servers are made: ``GymService(handler, ...).build()``. ``image_format`` is one of
    Pillow's, ``image_mime`` follows from it, ``image_quality`` is that of `ImageFormat`; raises `ValueError` for others."""

    def __init__(
        self,
        handler: BaseGymHandler,
        max_inflight: int = 0,
        admit_timeout: float = 5.0,
        api_key: str = "",
        image_format: str = "PNG",
        image_mime: str = "",
        image_quality: int = 0,
    ) -> None:
        self._handler = handler
        self._images = parse_image_format(image_format, image_mime, image_quality)
        self._settings = GymSettings(
            api_key=api_key or os.environ.get("GYM_API_KEY", ""),
            max_inflight=max_inflight,
            admit_timeout=admit_timeout,
            max_sessions=handler.max_sessions,
            session_timeout=handler.session_timeout,
        )

    def build(self, startup_callback: Callback | None = None, shutdown_callback: Callback | None = None) -> Starlette:
        """The ASGI application. The callbacks, plain or asynchronous, come before the first request and after the last one."""

        @asynccontextmanager
        async def open_calls() -> AsyncIterator[GymCalls]:
            await _run_callback(startup_callback)
            try:
                async with self._open_calls() as calls:
                    yield calls
            finally:
                with anyio.CancelScope(shield=True):
                    await _run_callback(shutdown_callback)

        gateway = GymGateway(open_calls, self._settings)
        self._handler.get_session_stats = gateway.stats  # type: ignore[method-assign]
        return gateway.application()

    @asynccontextmanager
    async def _open_calls(self) -> AsyncIterator[GymCalls]:
        subjects = Subjects(RUN)
        slots = self._handler.max_sessions or UNLIMITED_SLOTS
        images = InMemoryImageStore()
        async with MemoryServer().connect(RUN, worker=WORKER) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            context = WorkerContext(
                bus=bus,
                subjects=subjects,
                worker=WORKER,
                lane="",
                settings=EnvironmentSettings(),
                limits=LimitSettings(idle=self._handler.session_timeout),
                make=lambda task: HandlerEnvironment(self._handler, images, self._images),
                nonce=lambda: secrets.token_hex(8),
            )
            host = SessionHost(context, slots, defaultdict(float))

            async def send_heartbeats() -> None:
                while True:
                    heartbeat = Heartbeat(role="environment", worker=WORKER, session_slots=slots, sessions=host.open)
                    await bus.broadcast(subjects.heartbeat("environment", WORKER), encode(heartbeat))
                    await anyio.sleep(HEARTBEAT_SECONDS)

            try:
                async with sessions(bus, subjects) as client, anyio.create_task_group() as group:
                    await group.start(host.run)
                    group.start_soon(send_heartbeats)
                    yield GymCalls(
                        client,
                        call_seconds=self._settings.call_seconds,
                        max_sessions=self._handler.max_sessions,
                        load=images.load,
                        images=self._images,
                    )
                    group.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._handler.aclose()


def build_gym_service(handler: BaseGymHandler) -> Starlette:
    """The service as the protocol's first servers are made: set by the variables ``GYM_API_KEY``, ``GYM_MAX_INFLIGHT``,
    ``GYM_ADMIT_TIMEOUT``, ``GYM_IMAGE_FORMAT`` and ``GYM_IMAGE_MIME``."""
    return GymService(
        handler,
        max_inflight=int(os.environ.get("GYM_MAX_INFLIGHT", "0")),
        admit_timeout=float(os.environ.get("GYM_ADMIT_TIMEOUT", "5")),
        image_format=os.environ.get("GYM_IMAGE_FORMAT", "PNG"),
        image_mime=os.environ.get("GYM_IMAGE_MIME", ""),
    ).build()


async def _run_callback(callback: Callback | None) -> None:
    if callback is not None and inspect.isawaitable(pending := callback()):
        await pending


class HandlerEnvironment:
    """A handler's environment behind fleetbus's calls. It rewards step by step; its verdict is their sum."""

    replayable = False

    def __init__(self, handler: BaseGymHandler, images: InMemoryImageStore, wanted: ImageFormat) -> None:
        self._handler = handler
        self._images = images
        self._format = wanted
        self._environment: Any = None
        self._rewards: list[float] = []

    async def open(self, task: Task) -> None:
        self._seed = task.seed or 0
        self._environment = await self._handler.create_env(dict(task.config))

    async def reset(self) -> Start:
        observation, info = await self._environment.reset(self._seed)
        system = await self._environment.system_prompt()
        messages = (await self._message("system", system), await self._message("user", observation))
        return Start(messages=messages, info=info)

    async def step(self, action: Action) -> Step:
        observation, reward, done, info = await self._environment.step(action.text)
        messages = (await self._message("user", observation),)
        self._rewards.append(to_plain_number(reward))
        return Step(messages=messages, reward=self._rewards[-1], terminated=bool(done), info=info)

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=math.fsum(self._rewards))

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    async def _message(self, role: Any, observation: object) -> ChatMessage:
        """An observation is a text, or ``obs_str`` and images for each ``<image>`` in it."""
        if not isinstance(observation, dict):
            return ChatMessage(role=role, content=str(observation))
        shown = (observation.get("multi_modal_input") or {}).get(PLACEHOLDER) or ()
        pictures = [await encode_image_file(image, self._format) for image in shown]
        content = await insert_images(str(observation["obs_str"]), pictures, self._images.store_image, PLACEHOLDER)
        return ChatMessage(role=role, content=content)
