"""Harbor environments of one worker: the folder that its operator named, what their boxes are made by, and boxes kept warm."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.tasks.harbor import HarborStep, HarborTask, Place, find_task, find_unsupported, hash_files, list_folders
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import AdapterContext, EnvironmentFactory
from fleetbus_workers.environment.adapters.harbor.box import Box, BoxMaker, Recipe
from fleetbus_workers.environment.adapters.harbor.environment import HarborEnvironment
from fleetbus_workers.environment.adapters.harbor.grading import Grade, grade_separately, grade_shared, resolve_variables
from fleetbus_workers.environment.adapters.harbor.sandbox_box import SandboxBoxes
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.isolation.sandbox import SandboxLimits, find_isolation
from fleetbus_workers.environment.task_permissions import TaskPermissions, read_permissions

_log = structlog.get_logger(__name__)


class HarborEnvironments:
    """Makes environments of the tasks at ``harbor:DIR``; use it inside `run`. Raises `UserError` for a folder without tasks."""

    def __init__(self, location: str, settings: Configuration, *, prompt: str, observation_bytes: int) -> None:
        list_folders(location)
        self._location = location
        self._settings = settings
        self._permissions: TaskPermissions = read_permissions(settings.environment)
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._maker: BoxMaker | None = None
        self._tasks: dict[str, HarborTask] = {}
        self._folder_hashes: dict[tuple[str, Path], str] = {}
        """By a task's hash and a folder of it: what was read once is not read for every episode."""
        self.warm_boxes: dict[str, deque[Box]] = {}
        self._group: TaskGroup | None = None

    def __call__(self) -> HarborEnvironment:
        return HarborEnvironment(
            self._find,
            self._open_box,
            self._grade,
            prompt=self._prompt,
            observation_bytes=self._observation_bytes,
            command_seconds=self._settings.limits.tool_call,
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Sweep what a crash left; at the end every box is removed. Raises `UserError` where nothing can hold one."""
        async with AsyncExitStack() as stack:
            self._maker = await build_box_maker(self._settings)
            await stack.enter_async_context(self._maker.run())
            self._group = await stack.enter_async_context(anyio.create_task_group())
            try:
                yield
            finally:
                self._group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for boxes in self.warm_boxes.values():
                        while boxes:
                            await boxes.pop().stop()

    async def _find(self, task: Task) -> HarborTask:
        digest = str(task.config.get("digest"))
        if digest not in self._tasks:
            try:
                harbor = await anyio.to_thread.run_sync(find_task, self._location, task)
                problems = find_unsupported(harbor) + await self._find_unsupported(harbor)
            except UserError as error:
                raise EnvironmentFailed(str(error)) from error
            if problems:
                raise EnvironmentFailed(f"task {task.key} cannot be played here: {problems[0]}")
            self._tasks[digest] = harbor
        return self._tasks[digest]

    async def _find_unsupported(self, harbor: HarborTask) -> list[str]:
        assert self._maker is not None
        users = [user for step in harbor.steps for user in (step.agent.user, step.verifier.user)]
        found = self._maker.find_unsupported(await self._build_recipe(harbor), users)
        return [f"{problem} (without a Docker engine)" for problem in found]

    async def _build_recipe(self, harbor: HarborTask, place: Place | None = None, folder: Path | None = None) -> Recipe:
        place = place or harbor.config.environment
        folder = folder or harbor.folder / "environment"
        known = (harbor.digest, folder)
        if known not in self._folder_hashes:
            there = folder.is_dir()
            self._folder_hashes[known] = await anyio.to_thread.run_sync(hash_files, folder) if there else ""
        return Recipe(
            folder=folder,
            digest=f"{self._folder_hashes[known]}-{place.docker_image or ''}",
            place=place,
            variables=resolve_variables(place.env, self._permissions),
        )

    async def _open_box(self, harbor: HarborTask) -> Box:
        """A warm box of the task if there is one; others are started for the episodes after this one."""
        assert self._maker is not None and self._group is not None
        recipe = await self._build_recipe(harbor)
        warm = self.warm_boxes.setdefault(harbor.digest, deque())
        box = warm.popleft() if warm else await self._maker.start(recipe)
        if len(warm) < self._settings.environment.warm:
            self._group.start_soon(self._warm_up, harbor.digest, recipe)
        return box

    async def _warm_up(self, digest: str, recipe: Recipe) -> None:
        assert self._maker is not None
        try:
            box = await self._maker.start(recipe)
        except (EnvironmentFailed, OSError) as error:  # a full disk is no reason to end the worker
            _log.warning("box kept warm failed to start; the next episode starts its own", reason=str(error))
            return
        if (
            len(self.warm_boxes[digest]) < self._settings.environment.warm
            and sum(map(len, self.warm_boxes.values())) < self._limit
        ):
            self.warm_boxes[digest].append(box)
        else:
            await box.stop()

    @property
    def _limit(self) -> int:
        """Most boxes that are kept warm, of all tasks together."""
        return max(self._settings.environment.slots, self._settings.environment.warm)

    async def _grade(self, harbor: HarborTask, box: Box, step: HarborStep) -> Grade:
        assert self._maker is not None
        variables = resolve_variables(step.verifier.env, self._permissions)
        seconds = self._settings.limits.verify
        if not step.separate:
            return await grade_shared(box, step, variables, seconds)
        own = next((tests for tests in reversed(step.tests) if (tests / "Dockerfile").is_file()), None)
        recipe = await self._build_recipe(harbor, step.verifier.environment or harbor.config.environment, own)
        if step.verifier.environment is not None and not step.verifier.environment.docker_image and own is None:
            image = harbor.config.environment.docker_image
            recipe = await self._build_recipe(harbor, _with_image(step.verifier.environment, image))
        verifier = await self._maker.start(recipe)
        try:
            return await grade_separately(box, verifier, step, variables, seconds)
        finally:
            await verifier.stop()


def build(context: AdapterContext) -> EnvironmentFactory:
    """Environments of the tasks at ``harbor:DIR``. Raises `UserError` for a folder without tasks."""
    arguments = context.grading_arguments("compact")
    return HarborEnvironments(
        context.spec, context.settings, prompt=arguments["prompt"], observation_bytes=arguments["observation_bytes"]
    )


def _with_image(place: Place, image: str | None) -> Place:
    return msgspec.structs.replace(place, docker_image=image)


async def build_box_maker(settings: Configuration) -> BoxMaker:
    """Containers where a Docker engine answers, else the sandbox; `environment.boxes` names one of them. Raises `UserError`."""
    wanted = settings.environment.boxes
    if wanted in ("auto", "docker"):
        from fleetbus_workers.environment.adapters.harbor.docker_box import DockerBoxes, find_engine

        problem = await find_engine()
        if not problem:
            return DockerBoxes(settings)
        if wanted == "docker":
            raise UserError(f"Harbor tasks in containers: {problem}")
    limits = SandboxLimits(
        seconds=settings.limits.episode,
        cpu_seconds=int(settings.limits.episode),
        processes=128,
        open_files=256,
        output_bytes=max(2000, settings.environment.observation_bytes // 2),
    )
    return SandboxBoxes(await find_isolation(), limits)
